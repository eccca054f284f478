"Let pytest run each notebook in `nbs` as a test."
import os
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are so small that threads slow them down
os.environ.setdefault('MPLBACKEND', 'agg')
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
