"README.md holds: its example runs, its commands exist, its table is what the script prints."
import os, re, shutil, subprocess, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
readme = (root/'README.md').read_text(encoding='utf-8')

def blocks(text, lang): return re.findall(fr'^```{lang}\n(.*?)^```$', text, re.M|re.S)

def run(*args, cwd=None):
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(o for o in (str(root), os.environ.get('PYTHONPATH')) if o),
        OMP_NUM_THREADS='1', MPLBACKEND='agg')
    res = subprocess.run([sys.executable, *args], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=1200)
    assert not res.returncode, res.stderr
    return res.stdout

def test_example_runs(tmp_path):
    "In a process of its own; the lines that are shown before it run after it"
    code = blocks(readme, 'python')
    whole = [o for o in code if 'import' in o]
    assert len(whole)==1 and len(code)>1
    (tmp_path/'example.py').write_text('\n'.join([*whole, "print('RAN', len(learn.recorder.losses))",
        *(o for o in code if o not in whole)]), encoding='utf-8')
    out = run('example.py', cwd=tmp_path)
    assert 'RAN 30' in out and len(re.findall(r'^\W*[0-4] +\d\.\d+ .*\d\d:\d\d', out, re.M))>=5

@pytest.mark.skipif(not shutil.which('make'), reason='there is no make here')
def test_commands_exist():
    commands = {o for text in (readme, (root/'CONTRIBUTING.md').read_text(encoding='utf-8'))
        for o in re.findall(r'(?:^|`)make (\w[\w-]*)', text, re.M)}
    assert {'demo','test','docs','docs-serve','docs-test'} <= commands
    for o in sorted(commands):
        res = subprocess.run(['make','-n',o], cwd=root, capture_output=True, text=True)
        assert not res.returncode, res.stderr

def test_addresses_are_the_projects():
    url = re.search(r'^Repository *= *"(.+)"', (root/'pyproject.toml').read_text(encoding='utf-8'), re.M)[1]
    for o in (f'git clone {url} &&', f'pip install git+{url} ', 'pip install fastaccum '): assert o in readme

def test_scripts_and_pictures_exist():
    for o in re.findall(r'`python ([\w/]+\.py)', readme)+re.findall(r'!\[[^]]*\]\((?!https:)([^)]+)\)', readme):
        assert (root/o).is_file(), o

def test_table_is_what_the_script_prints():
    "All of it but the size of a rounding error"
    out = run(str(root/'benchmarks/remainders.py'))
    rows = [o for o in out.splitlines() if o.startswith('|') and 'off by' not in o]
    assert len(rows)>4 and all(o in readme for o in rows)

def test_first_screen():
    "What it is, how to install it, and lines that run come before the picture, and the picture before make"
    marks = ['Gradient accumulation for fastai', 'pip install', '(https://fastaccum.github.io/fastaccum/explanations/'
        'which_way.html)', 'colab.research.google.com', 'import GradientAccumulation', 'drop their incomplete last',
        '## When, and when not', '](images/', '## What goes wrong', 'make demo']
    at = [readme.find(o) for o in marks]
    assert -1 not in at and at==sorted(at)

def test_code_is_not_cut():
    "In the narrowest place that it is read in with a wide screen, which is the site's"
    assert [o for block in blocks(readme, r'\w*') for o in block.split('\n') if len(o)>100]==[]
