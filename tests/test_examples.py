"Each script in `examples/` runs unchanged, is short, and prints its result in its last line."
import ast, os, re, shutil, subprocess, sys
from importlib.util import find_spec
from pathlib import Path
import fresh, pytest

root = Path(__file__).resolve().parent.parent
folder = root/'examples'
scripts = sorted(folder.glob('*.py'))
ours = 'from fastaccum import '

# For each script, a regular expression that must match the last line that it prints. The script itself asserts that
# two losses are close. The digits printed may differ by rounding.
last_lines = {'01_images.py': r'10 steps of 256 images',
    '02_text.py': r'perplexity [\d.]+ in micro-batches of 8, [\d.]+ in whole batches of 32',
    '03_hugging_face_padding.py': r'loss [\d.]+ in micro-batches of 16, [\d.]+ in batches of 64',
    '04_out_of_memory.py': r'loss [\d.]+ with the memory of 100 samples, [\d.]+ with that of 256',
    '05_loss_that_compares_samples.py': r'loss [\d.]+ in micro-batches of 32, [\d.]+ in whole batches of 256',
    '06_two_gpus.py': r'processes: 2, .* fit: 18',
    '07_growing_batch.py': r'47 steps, of 32 samples at first and of 256',
    '08_check_a_run.py': r'^exact: .*gradients, model state$'}

def test_the_scripts_are_numbered_and_listed():
    assert [o.name for o in scripts]==list(last_lines)
    assert [o.name[:2] for o in scripts]==[f'{i+1:02}' for i in range(len(scripts))]
    listed = re.findall(r'^\| \[(.+?)\]\(\1\) \|', (folder/'README.md').read_text(encoding='utf-8'), re.M)
    assert listed==[o.name for o in scripts]

@pytest.mark.parametrize('script', scripts, ids=lambda o: o.name)
def test_a_script_is_short_and_says_what_it_shows(script):
    text = script.read_text(encoding='utf-8')
    assert 15<=len(text.splitlines())<=30
    assert max(map(len, text.splitlines()))<=120
    doc = ast.get_docstring(ast.parse(text))
    assert doc and '\n' not in doc
    # otherwise fastai's class of the same name is used
    assert text.index('from fastai.')<text.index(ours)

@pytest.mark.skipif(find_spec('ruff') is None, reason='`make compat` does not install ruff')
def test_a_sorter_of_imports_leaves_fastaccum_after_fastai(tmp_path):
    for script in scripts:
        shutil.copyfile(script, tmp_path/script.name)
        cmd = [sys.executable,'-m','ruff','check','--isolated','--select','I','--fix','--quiet',tmp_path/script.name]
        subprocess.run(cmd, check=True)
        text = (tmp_path/script.name).read_text(encoding='utf-8')
        fastais = [m.start() for m in re.finditer('^from fastai.+', text, re.M) if ours not in m[0]]
        assert max(fastais)<text.index(ours), script.name

def run_on_two_processes(script):
    launcher = '-m torch.distributed.run --standalone --nproc-per-node 2'.split()
    path = os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')])
    # two processes cannot share the only GPU of a machine
    env = os.environ | dict(PYTHONPATH=path, PYTHONIOENCODING='utf-8', OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    cmd = [sys.executable, *launcher, script]
    return subprocess.run(cmd, env=env, capture_output=True, text=True, encoding='utf-8', timeout=300)

@pytest.mark.parametrize('script', scripts, ids=lambda o: o.name)
def test_a_script_runs(script):
    # skip scripts whose packages are missing: `make compat`, for the oldest versions, installs neither
    # of these two
    optional = re.findall(r'^from (mlxtend|transformers)', script.read_text(encoding='utf-8'), re.M)
    for nm in optional: pytest.importorskip(nm)
    res = run_on_two_processes(script) if script.name=='06_two_gpus.py' else fresh.run(script)
    assert not res.returncode, res.stderr
    last = res.stdout.replace('\r', '\n').strip().splitlines()[-1]
    assert re.search(last_lines[script.name], last), last
    assert 'ImportOrderWarning' not in res.stderr
