"""The live view of a run: a projection of its journal, a server on loopback, and a page without a build step."""
