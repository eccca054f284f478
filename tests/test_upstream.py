"""The patches for fastai in `upstream` apply to the installed version, and mend its faults.

The page `faults_of_fastai` has a test for each fault, and shows that it fails without the patch.
"""
import json, os, re, shutil, subprocess, sys, textwrap
from importlib.util import find_spec
from pathlib import Path
import fastai, pytest
from common import copy_folder

root = Path(__file__).resolve().parent.parent
patches = sorted((root/'upstream').glob('*.patch'))
cells = {c['id']:''.join(c['source']) for c in
    json.loads((root/'nbs/contribute/faults_of_fastai.ipynb').read_text(encoding='utf-8'))['cells']}
tests = {nm:src.split('\n\nfault(')[0] for nm,src in cells.items() if src.startswith(f'def {nm}():')}
newest = re.search("^newest = '(.+?)'", cells['fault'], re.M)[1]

def test_each_fault_has_a_patch_with_the_test_of_the_page():
    assert [o.stem for o in patches]==sorted(tests) and len(tests)>10
    for o in patches: assert textwrap.indent(tests[o.stem], '    ') in o.read_text(encoding='utf-8')

@pytest.fixture(scope='module')
def patched(tmp_path_factory):
    "Return a folder with a copy of fastai to which all patches were applied"
    if fastai.__version__!=newest:
        pytest.skip(f'the patches are for fastai {newest}, and {fastai.__version__} is installed')
    if not shutil.which('git'): pytest.skip('there is no git here')
    tmp = tmp_path_factory.mktemp('patched')
    stock = Path(find_spec('fastai').origin).parent
    copy_folder(stock, tmp/'fastai', ignore=shutil.ignore_patterns('__pycache__', 'images'))
    # `git apply` would skip these files if their folder lay within a repository
    env = os.environ | dict(GIT_CEILING_DIRECTORIES=str(tmp.parent))
    def apply(*args): subprocess.run(['git','apply',*args], cwd=tmp, env=env, check=True)
    for o in patches: apply('--check', o)   # each patch also applies without the others
    for o in patches: apply(o)
    return tmp

def test_with_all_patches_every_test_of_the_page_passes(patched):
    body = '\n'.join([cells['imports'], *tests.values(), f'''
import fastai
assert fastai.__file__.startswith({str(patched)!r}), fastai.__file__
for test in ({', '.join(tests)}):
    torch.manual_seed(0)
    try: test()
    except Exception as e: print('FAILED', test.__name__, repr(e))
print('DONE')'''])
    env = os.environ | dict(PYTHONPATH=str(patched), OMP_NUM_THREADS='1')
    res = subprocess.run([sys.executable,'-W','ignore','-c',body], env=env, cwd=patched, capture_output=True, text=True,
        timeout=300)
    assert not res.returncode and 'DONE' in res.stdout, res.stderr
    assert 'FAILED' not in res.stdout, res.stdout
