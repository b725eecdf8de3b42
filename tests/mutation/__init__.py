"""Mutation testing of the operator's decisions: what could be wrong in the code without any test noticing it.

python -m tests.mutation                     every mutant, each tried against the tests that reach its line
python -m tests.mutation --sample 300        300 of them, drawn by --seed
python -m tests.mutation --only decide/crash --seeds 20    one module; survivors also meet twenty simulated disasters

A mutant is the operator with one comparison, boolean or early exit changed. One that no check notices shows an
assertion that is missing, or code that makes no difference: it is killed by a new test, or argued in `argued.toml`.
"""
