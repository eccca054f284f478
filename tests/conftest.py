import gc, os, random
import numpy as np, pytest
from hypothesis import settings
from device import pytest_pyfunc_call   # pytest calls this hook to run laws/test_device.py in a separate process

@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    "Run each test in an empty folder, because `lr_find` and `save` write files into the current folder"
    monkeypatch.chdir(tmp_path)

@pytest.fixture(autouse=True)
def frozen():
    "Exclude fastai's objects from garbage collection, which takes 0.5 s with them whenever simulated memory runs out"
    gc.freeze()
    yield
    gc.unfreeze()

@pytest.fixture(autouse=True)
def seeded():
    "Seed the random numbers of Python and NumPy, which loaders use to shuffle; PyTorch's default seed is constant"
    random.seed(0)
    np.random.seed(0)

# `make test` tries the same 20 examples every time, and has no deadline, because machines differ in speed.
# HYPOTHESIS=random draws new examples in each run, and `make test-all` tries 100 examples.
max_examples = 100 if os.environ.get('TESTS')=='all' else 20
settings.register_profile('same', deadline=None, derandomize=True, max_examples=max_examples)
settings.register_profile('random', deadline=None, max_examples=max_examples)
settings.load_profile(os.environ.get('HYPOTHESIS', 'same'))
