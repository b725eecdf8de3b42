"""What only a GPU can prove: `make test-gpu`, or `python3 -m tests.gpu` with PYTHONPATH=analysis:trainer.

One NVIDIA GPU, and a Python that has torch and numpy; nothing else is needed, so these are tests of unittest. With
PACEKEEPER_TEST_DEVICE=cpu they run on the CPU, which shows that they can run, and not what they are there to show.
"""
