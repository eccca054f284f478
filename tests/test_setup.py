"What make does for those who work on fastaccum: environments, pages, hooks, and how a run of the tests ends."
import json, os, re, shutil, socket, subprocess, sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
import pytest
import run

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tools'))
import page, serve

def take(tmp, *names):
    "Copies of some of the files here"
    for nm in names:
        (tmp/nm).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/nm, tmp/nm)

# Environments

stub = """#!/bin/sh
# A Python that makes environments of nothing, and notes what pip is told; it fails where FAILS says so
case "$1 $2" in
  '-m venv') echo "venv $NAME" >> "$LOG"; test "$3" = --clear && rm -rf "$4"
             mkdir -p "$4/bin"; touch "$4/lib-$NAME"; cp "{base}/$NAME" "$4/bin/python";;
  '-m pip')  echo "pip $NAME $5 $6" >> "$LOG"; test -z "$FAILS";;
  *) case "$2" in *base_prefix*) echo "3.12 in $NAME"; echo "{base}/$NAME";; *) exec "{python}" "$@";; esac;;
esac
"""

class Made:
    "A copy of what make needs, and two Pythons"
    def __init__(self, tmp):
        self.dir,self.log = tmp/'copy',tmp/'log'
        take(self.dir, 'Makefile', 'tools/environment.py', 'settings.ini', 'pyproject.toml', 'setup.py')
        for nm in ('python-a','python-b'):
            (tmp/nm).write_text(stub.replace('$NAME', nm).format(base=tmp, python=sys.executable))
            (tmp/nm).chmod(0o755)
        self.pythons = tmp
        # in place of python3
        (self.dir/'tools/default.mk').write_text(f'PYTHON ?= {tmp}/python-a\ninclude Makefile\n')
    def __call__(self, *args, target='env', fails=''):
        "What was done by one make: whether it failed, the lines of the log, and what it said"
        self.log.write_text('')
        env = {k:v for k,v in os.environ.items() if k not in ('PYTHON','VENV','MAKEFLAGS','MAKELEVEL')}
        env |= dict(LOG=str(self.log), FAILS=fails)
        args = [o.replace('PYTHON=', f'PYTHON={self.pythons}/') for o in args]
        res = subprocess.run(['make','-f','tools/default.mk',target,*args], cwd=self.dir, env=env,
            capture_output=True, text=True)
        assert 'Traceback' not in res.stderr, res.stderr
        return res.returncode!=0,self.log.read_text().splitlines(),res.stdout+res.stderr

@pytest.fixture
def make(tmp_path): return Made(tmp_path)

def asks_more(dir):
    with (dir/'settings.ini').open('a') as f: f.write('more_requirements = more\n')
def touched(dir):
    for o in ('pyproject.toml','settings.ini'): os.utime(dir/o, (4e9,4e9))
def own(dir):
    (dir/'.venv/bin').mkdir(parents=True)
    shutil.copy(dir.parent/'python-b', dir/'.venv/bin/python')

a,b,pip_a,pip_b = 'python-a','python-b','pip python-a -e .[dev]','pip python-b -e .[dev]'
docs = dict(target='env-docs')
# What happens to the files, what make is told, and what it does: whether it fails, the log, and words that it says
histories = {
    'touched files install nothing': [((), {}, 0, [f'venv {a}',pip_a], ''), (touched, (), {}, 0, [], '')],
    'changed files install once': [((), {}, 0, [f'venv {a}',pip_a], ''), (asks_more, (), {}, 0, [pip_a], ''),
        ((), {}, 0, [], '')],
    'an update that fails keeps the environment': [((), {}, 0, [f'venv {a}',pip_a], ''),
        (asks_more, (), dict(fails='offline'), 1, [pip_a], 'failed'), ((), {}, 0, [pip_a], '')],
    'another Python makes it anew': [((), {}, 0, [f'venv {a}',pip_a], ''),
        ((f'PYTHON={b}',), {}, 0, [f'venv {b}',pip_b], 'another Python'), ((), {}, 0, [], '')],
    'a first try that failed is made anew': [((f'PYTHON={b}',), dict(fails='x'), 1, [f'venv {b}',pip_b], 'failed'),
        ((f'PYTHON={a}',), {}, 0, [f'venv {a}',pip_a], 'was not finished'), ((), dict(fails='x'), 0, [], '')],
    'the site has an installation of its own': [((), docs, 0, [f'venv {a}',pip_a,f'pip {a} -q -e'], ''),
        ((), docs, 0, [], ''), ((f'PYTHON={b}',), docs, 0, [f'venv {b}',pip_b,f'pip {b} -q -e'], 'anew')],
    'one that make did not make is used or refused': [(own, (f'PYTHON={a}',), {}, 1, [], 'make VENV='),
        ((f'PYTHON={b}',), {}, 0, [pip_b], ''), ((f'PYTHON={b}',), {}, 0, [], '')]}

@pytest.mark.parametrize('history', histories)
def test_environments(make, history):
    for *change,args,kwargs,fails,did,said in histories[history]:
        for o in change: o(make.dir)
        failed,log,text = make(*args, **kwargs)
        assert (failed,log)==(bool(fails),did) and said in text, text

def test_the_oldest_versions_are_the_lower_bounds(make):
    failed,log,_ = make(target='env-compat')
    assert not failed and log[0]=='venv python-a' and log[1].startswith('pip python-a -c ')
    bounds = re.search(r'^requirements *= *(.+)', (root/'settings.ini').read_text(encoding='utf-8'), re.M)[1]
    oldest = [o.replace('>=', '==')+'.*' for o in bounds.split()]
    assert (make.dir/'.venv-compat/oldest.txt').read_text().split()==oldest

# Pages

def png(level, dot=None):
    from PIL import Image
    image,out = Image.new('RGB', (100,100), (level,)*3),BytesIO()
    if dot: image.putpixel((1,1), (dot,)*3)
    image.save(out, 'png')
    return b64encode(out.getvalue()).decode()

def stream(*text, name='stdout'): return dict(output_type='stream', name=name, text=list(text))

@pytest.mark.parametrize('a,b', [('loss 1e-16', 'loss 6e-17'), ('0.0', '2.7e-17'),
    ('1.677985', '1.677984'), ('1e-07', '6e-08'),
    ('0 2.1 00:01', '0 2.1 00:12'), ('the same run (0.2 s)', 'the same run (13.4 s)'),
    ('<f at 0x7f12>', '<f at 0x55aa>')])
def test_what_says_the_same(a, b): assert page.same([stream(a)], [stream(b)])

@pytest.mark.parametrize('a,b', [('loss 1e-16', 'loss 1e-8'), ('1e-9', '2e-7'), ('1.677985', '1.67902'),
    ('30 steps', '31 steps'), ('100000', '100001'),
    ('1 2', '1 2 3'), ('good', 'bad'), ('-1.5', '1.5')])
def test_what_says_something_else(a, b): assert not page.same([stream(a)], [stream(b)])

def test_pictures_are_compared_by_what_they_show():
    def picture(o):
        return [dict(output_type='display_data', metadata={}, data={'image/png':o, 'text/plain':['<Figure>']})]
    assert page.same(picture(png(100)), picture(png(100, 110)))
    assert not page.same(picture(png(100)), picture(png(100, 200)))
    assert not page.same(picture(png(100)), picture(png(120)))
    assert not page.same(picture(png(100)), [])

def test_what_is_not_saved():
    site = '/opt/x/lib/python3.12/site-packages'
    warned = f'{site}/torch/jit.py:12: FutureWarning: old\n  warnings.warn(\n'
    assert page.joined([stream(warned, name='stderr')])==[]
    outs = [stream('a\n', f'{root}/fastaccum/x.py and '), stream(f'{site}/fastai/y.py\n')]
    assert page.joined(outs)==[stream('a\n', 'fastaccum/x.py and fastai/y.py\n')]
    assert page.joined([stream('a\n'), stream('b\n', name='stderr')])==[stream('a\n'), stream('b\n', name='stderr')]

@pytest.mark.nbdev
def test_a_page_that_says_the_same_is_not_changed(tmp_path):
    take(tmp_path, 'tools/page.py', 'pyproject.toml')
    fn = tmp_path/'nbs/core/00_x.ipynb'   # in a folder of its own
    fn.parent.mkdir(parents=True)
    def write(print_, saved):
        cells = [dict(cell_type='markdown', id='title', metadata={}, source=['# x'])]
        for id,src,out in (('a',"import time; print(f'{time.time_ns()%9*1e-17:e}, 00:0{time.time_ns()%9}')",
                [stream('1e-17, 00:03\n')]), ('b',print_,[stream(saved)]),
                           ('c','#| slow\nprint(2)',[stream('as it was\n')])):
            cells.append(dict(cell_type='code', execution_count=None, id=id, metadata={},
                source=src.splitlines(True), outputs=out))
        kernel = dict(display_name='python3', language='python', name='python3')
        nb = dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
        fn.write_text(json.dumps(nb, sort_keys=True, indent=1)+'\n')
        return fn.read_text()
    def run():
        return subprocess.run([sys.executable, 'tools/page.py', 'x'], cwd=tmp_path, capture_output=True, text=True)
    before = write('print(1)', '1\n')
    res = run()
    assert not res.returncode and 'as it was' in res.stdout and fn.read_text()==before, res.stdout+res.stderr
    before = write('print(1)', 'old\n')
    assert 'saved: b' in run().stdout and fn.read_text()==before.replace('old', '1')
    before = write('1/0', '1\n')
    res = run()
    assert res.returncode and 'ZeroDivisionError' in res.stdout and fn.read_text()==before
    res = subprocess.run([sys.executable, 'tools/page.py', 'nowhere'], cwd=tmp_path, capture_output=True, text=True)
    assert res.returncode and 'nowhere' in res.stderr and '00_x' in res.stderr and 'Traceback' not in res.stderr

# What git shows

@pytest.mark.nbdev
@pytest.mark.parametrize('there', [True,False])
def test_hooks_leave_nothing_behind(tmp_path, there):
    "And git works outside the environment, also where that is gone"
    repo,bin = tmp_path/'repo',tmp_path/'env/bin'
    take(repo, '.gitattributes', 'tools/hooks.py')
    bin.mkdir(parents=True)
    (bin/'python').symlink_to(Path(sys.executable).resolve())
    if there:
        for nm in ('nbdev-diff-driver','nbdev-merge'): (bin/nm).symlink_to(Path(sys.executable).with_name(nm))
    path = f"{Path(shutil.which('git')).parent}:/usr/bin:/bin"
    env = {k:v for k,v in os.environ.items() if not k.startswith('GIT_')} | dict(PATH=path, HOME=str(tmp_path/'home'))
    (tmp_path/'home').mkdir()
    def git(*args, ok=True):
        res = subprocess.run(['git','-c','user.name=a','-c','user.email=a@b',*args], cwd=repo, env=env,
            capture_output=True, text=True)
        assert not ok or not res.returncode, res.stdout+res.stderr
        return res.stdout
    def write(*sources):
        cells = [dict(cell_type='code', execution_count=None, id=f'c{i}', metadata={}, outputs=[], source=[o])
            for i,o in enumerate(sources)]
        (repo/'x.ipynb').write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5),
            sort_keys=True, indent=1)+'\n')
    git('init', '-q', '-b', 'main')
    write('old_a', 'b', 'c', 'd', 'e')
    git('add', '.'); git('commit', '-qm', 'one')
    subprocess.run([bin/'python', 'tools/hooks.py'], cwd=repo, env=env, check=True)
    assert git('status', '--porcelain')=='' and not list((tmp_path/'home').iterdir())
    write('new_a', 'b', 'c', 'd', 'e')
    shown = git('diff')
    assert 'new_a' in shown and 'old_a' in shown and ('"source"' in shown)!=there   # nbdev's shows cells, not JSON
    git('commit', '-qam', 'two')
    git('checkout', '-qb', 'other', 'HEAD~1')
    write('old_a', 'b', 'c', 'd', 'new_e')
    git('commit', '-qam', 'three')
    git('merge', '-q', '-m', 'four', 'main')
    cells = json.loads((repo/'x.ipynb').read_text())['cells']
    assert [o['source'] for o in cells]==[['new_a'],['b'],['c'],['d'],['new_e']]

# Ports and numbers

def test_a_port_in_use_is_passed_over(capsys):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        port = s.getsockname()[1]
        with serve.serve(port) as server: assert port<server.server_port<port+20
        assert f'port {port}' in capsys.readouterr().out
        with pytest.raises(SystemExit, match='PORT='): serve.serve(port, tries=1)

@pytest.mark.parametrize('n', ['0','-1','many'])
def test_a_sweep_of_no_runs_is_refused(n):
    import sweep
    with pytest.raises(SystemExit, match=f'N={n}'): sweep.number(n)

# The run of the tests

def test_a_run_ends_with_what_failed_and_the_count(monkeypatch, capsys):
    ran = []
    outs = [('a.ipynb','passed'), ('test_c::d - why','failed'), ('test_c::e - type this','skipped')]
    monkeypatch.setattr(run, 'run', lambda fns: ran.extend(fns) or outs)
    assert run.main('setup', times=3) and [o.stem for o in ran]==['test_setup']*3
    assert capsys.readouterr().out.splitlines()==['SKIPPED test_c::e - type this', 'FAILED test_c::d - why',
        '1 passed, 1 failed, 1 skipped']
    monkeypatch.setattr(run, 'run', lambda fns: [])
    assert run.main('nowhere') and capsys.readouterr().out.splitlines()[-1]=='0 passed, 2 failed'

tests = """
import os, pytest
@pytest.fixture
def bad():
    yield
    raise ValueError
def test_good(): pass
def test_wrong(): assert False
def test_ends_badly(bad): pass
@pytest.mark.parametrize('o', [1,2])
def test_skipped(o): pytest.skip('type this')
"""
def test_outcomes_of_a_file(tmp_path):
    "Each test counts once; a file that dies, or that cannot be read, has failed"
    def outs(code, path=tmp_path/'test_it.py'):
        path.write_text(code)
        return [(nm.rpartition('::')[2], o) for nm,o in run.run_file(path)[0]]
    assert outs(tests)==[('test_good','passed'), ('test_wrong - assert False','failed'),
        ('test_ends_badly - failed on teardown with "ValueError"','failed'),
        ('test_skipped[1] - type this','skipped'), ('test_skipped[2] - type this','skipped')]
    assert outs('')==[]
    for code in ('def test_dies():\n    import os\n    os._exit(3)', 'def test_('):
        assert [o for _,o in outs(code)]==['failed']
