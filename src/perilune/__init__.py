"""Perilune: the scaling recipe of Kimi K2.5 as one library.

Importing this package is cheap: it loads no torch and no sub-package. Take a piece from where it lives, for example
`from perilune.optim import MuonClip`; `docs/glossary.md` maps every term to its file.
"""

__version__ = "0.1.0"
