"""Planted faults: each breaks one rule that must hold, and names the test that has to see it.
`python -m tests.mutants` runs them."""
