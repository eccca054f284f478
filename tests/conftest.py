import gc, os, random, sys
import numpy as np, pytest, torch
from hypothesis import settings
# pytest calls these hooks, which run the tests of laws/test_device.py in a separate process
from device import pytest_collection_finish, pytest_pyfunc_call, pytest_sessionfinish

@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    "Run each test in an empty folder, because `lr_find` and `save` write files into the current folder"
    monkeypatch.chdir(tmp_path)

@pytest.fixture(autouse=True)
def fastai_frozen():
    """Exclude fastai's objects from garbage collection

    fastaccum collects garbage whenever memory runs out. With fastai's objects, each collection takes 0.5
    seconds.
    """
    gc.freeze()
    yield
    gc.unfreeze()

@pytest.fixture(autouse=True)
def random_numbers_seeded():
    """Seed Python, NumPy and PyTorch before each test

    Otherwise the numbers that a test draws would depend on the tests that ran before it.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

@pytest.fixture(autouse=True)
def compiled_code_forgotten():
    """Make PyTorch forget what it has compiled, after each test

    PyTorch compiles each function for at most eight backends and kinds of inputs in a process. Otherwise a test
    that compiles the model of `toy` would train it without compiling it, if other tests had compiled it before.
    """
    yield
    if 'torch._dynamo' in sys.modules: torch.compiler.reset()

# How many random examples hypothesis tries for each test: always the same examples, or new ones with
# HYPOTHESIS=random. There is no deadline for an example, because machines differ in speed.
max_examples = dict(all=100, few=7).get(os.environ.get('TESTS'), 20)
settings.register_profile('same', deadline=None, derandomize=True, max_examples=max_examples)
settings.register_profile('random', deadline=None, max_examples=max_examples)
settings.load_profile(os.environ.get('HYPOTHESIS', 'same'))
