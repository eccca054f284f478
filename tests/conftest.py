import gc, os, random
import numpy as np, pytest
from hypothesis import settings
from device import pytest_pyfunc_call   # a hook: laws/test_device.py runs in a process of its own

@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)   # `lr_find` and `save` write next to the Learner

@pytest.fixture(autouse=True)
def frozen():
    "Keep fastai's objects out of garbage collections: fastaccum collects each time memory runs out, 0.5 s with them"
    gc.freeze()
    yield
    gc.unfreeze()

@pytest.fixture(autouse=True)
def seeded():
    "Seed Python and NumPy, by which loaders shuffle; PyTorch begins with the same random numbers in each process"
    random.seed(0)
    np.random.seed(0)

# `make test` tries the same few examples every time, on machines of any speed. HYPOTHESIS=random draws other examples,
# and `make test-all` draws more.
max_examples = 100 if os.environ.get('TESTS')=='all' else 20
settings.register_profile('same', deadline=None, derandomize=True, max_examples=max_examples)
settings.register_profile('random', deadline=None, max_examples=max_examples)
settings.load_profile(os.environ.get('HYPOTHESIS', 'same'))
