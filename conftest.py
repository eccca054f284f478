"Let pytest run each notebook in `nbs` as a test, and give all tests a home folder of their own."
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are so small that threads slow them down
os.environ['MPLBACKEND'] = 'agg'

# IPython, Matplotlib, W&B and others read settings from the user's home folder, or from a folder that a
# variable of the environment names, and write into it. The tests must depend on none of these settings,
# leave nothing behind, and run without a writable home. So they get an empty home, which is removed at
# the end of the session. The processes of pytest-xdist inherit it.
home_variable = 'FASTACCUM_HOME_OF_TESTS'
settings_of_user = ('XDG_CACHE_HOME', 'XDG_CONFIG_HOME', 'XDG_DATA_HOME', 'XDG_STATE_HOME', 'IPYTHONDIR',
    'MPLCONFIGDIR', 'MATPLOTLIBRC', 'FASTAI_HOME', 'TORCH_HOME', 'HF_HOME')
# launchers set these, and fastai then takes this process for one of several
of_launchers = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'
if home_variable not in os.environ:
    home_of_tests = TemporaryDirectory(prefix='fastaccum-home-', ignore_cleanup_errors=True)
    for name in ('HOME','USERPROFILE',home_variable): os.environ[name] = home_of_tests.name
    for name in list(os.environ):
        if name in (*settings_of_user,*of_launchers) or name.startswith('WANDB_'): del os.environ[name]

import pasted, pytest

pages = Path(__file__).resolve().parent/'nbs'

def pytest_collect_file(file_path, parent):
    is_page = file_path.suffix=='.ipynb' and pages in file_path.parents and not file_path.name.startswith('_')
    return Notebook.from_parent(parent, path=file_path) if is_page else None

class Notebook(pytest.File):
    def collect(self): yield Page.from_parent(self, name='page')

class Page(pytest.Item):
    def runtest(self):
        try: why = pasted.failure(self.path)
        except pytest.fail.Exception as e: why = str(e)   # pytest-timeout raises this; leave out its long traceback
        if why: pytest.fail(why, pytrace=False)

    def reportinfo(self): return self.path, None, self.nodeid
