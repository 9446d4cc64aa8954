"""`python -m perilune` is the command line."""

from perilune.cli import main

main()
