import gc, os, sys
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')   # the processes that tests start inherit it
os.environ.setdefault('MPLBACKEND', 'agg')
tests = Path(__file__).resolve().parent
sys.path[:0] = [str(tests),str(tests.parent/'tools')]
import numpy as np, pytest, random, torch
from device import pytest_pyfunc_call   # a hook: laws/test_device.py runs in a process of its own
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))

@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)   # `lr_find` and `save` write next to the Learner

@pytest.fixture(autouse=True)
def frozen():
    "Memory is collected each time it runs out: half a second where fastai's objects are looked at, too"
    gc.freeze()
    yield
    gc.unfreeze()

@pytest.fixture(autouse=True)
def seeded():
    "PyTorch begins with the same random numbers in each process; Python and NumPy, by which loaders shuffle, do not"
    random.seed(0)
    np.random.seed(0)

# `make test` tries the same few examples every time, on machines of any speed; HYPOTHESIS=random looks for others, and
# `make test-all` for more
from common import whole
from hypothesis import settings
settings.register_profile('same', deadline=None, derandomize=True, max_examples=100 if whole else 20)
settings.register_profile('random', deadline=None, max_examples=100 if whole else 20)
settings.load_profile(os.environ.get('HYPOTHESIS', 'same'))
