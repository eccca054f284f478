"What make does for those who work on fastaccum: environments, pages, hooks, and what a busy machine must not change."
import json, os, re, shutil, socket, subprocess, sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
import pytest

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
def make(tmp_path):
    if not shutil.which('make'): pytest.skip('there is no make here')
    return Made(tmp_path)

first_a,first_b = ['venv python-a','pip python-a -e .[dev]'],['venv python-b','pip python-b -e .[dev]']

def test_touched_files_install_nothing(make):
    assert make()[:2]==(False,first_a)
    for o in ('pyproject.toml','settings.ini'): os.utime(make.dir/o, (4e9,4e9))
    assert make()[:2]==(False,[])

def test_changed_files_install_once(make):
    make()
    with (make.dir/'settings.ini').open('a') as f: f.write('more_requirements = more\n')
    assert make()[1]==['pip python-a -e .[dev]']
    assert make()[1]==[]

def test_an_update_that_fails_keeps_the_environment(make):
    make()
    with (make.dir/'settings.ini').open('a') as f: f.write('more_requirements = more\n')
    assert make(fails='offline')[0]
    assert make()[:2]==(False,['pip python-a -e .[dev]'])

def test_another_python_makes_it_anew(make):
    make()
    failed,log,said = make('PYTHON=python-b')
    assert not failed and log==first_b and 'another Python' in said and 'anew' in said
    assert sorted(o.name for o in (make.dir/'.venv').glob('lib-*'))==['lib-python-b']
    assert make('PYTHON=python-b')[1]==[]

def test_without_python_the_environment_keeps_its_own(make):
    make('PYTHON=python-b')
    assert make()[:2]==(False,[])

def test_a_first_try_that_failed_is_made_anew(make):
    assert make('PYTHON=python-b', fails='offline')[0]
    failed,log,said = make('PYTHON=python-a')
    assert not failed and log==first_a and 'was not finished' in said
    assert make(fails='offline')[:2]==(False,[])

def test_docs_are_installed_once_and_again_with_a_new_environment(make):
    assert make(target='env-docs')[1]==first_a+['pip python-a -q -e']
    assert make(target='env-docs')[1]==[]
    assert make('PYTHON=python-b', target='env-docs')[1]==first_b+['pip python-b -q -e']

def test_an_environment_of_ones_own_is_not_deleted(make):
    "It is used, or refused"
    own = make.dir/'.venv'
    (own/'bin').mkdir(parents=True)
    shutil.copy(make.pythons/'python-b', own/'bin/python')
    (own/'mine').touch()
    failed,log,said = make('PYTHON=python-a')
    assert failed and log==[] and 'make VENV=' in said and (own/'mine').exists()
    assert make('PYTHON=python-b')[:2]==(False,['pip python-b -e .[dev]']) and (own/'mine').exists()
    assert make('PYTHON=python-b')[1]==[]

def test_the_oldest_versions_are_the_lower_bounds(make, tmp_path):
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
@pytest.mark.skipif(not shutil.which('git'), reason='there is no git here')
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

# A busy machine, and numbers that cannot be

def test_a_port_in_use_is_passed_over(capsys):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        port = s.getsockname()[1]
        with serve.serve(port) as server: assert port<server.server_port<port+20
        assert f'port {port}' in capsys.readouterr().out
        with pytest.raises(SystemExit, match='PORT='): serve.serve(port, tries=1)

@pytest.mark.parametrize('n', ['0','-1','many'])
def test_no_twins_are_no_sweep(n):
    import sweep
    with pytest.raises(SystemExit, match=f'N={n}'): sweep.number(n)

@pytest.mark.parametrize('module,threads,expected', [('demo',None,1), ('sweep',None,1), ('demo','2',2)])
def test_small_models_run_in_one_thread(module, threads, expected):
    "Unless the environment says otherwise; threads of small models wait for each other on a busy machine"
    env = {k:v for k,v in os.environ.items() if k!='OMP_NUM_THREADS'}
    if threads: env['OMP_NUM_THREADS'] = threads
    env['PYTHONPATH'] = os.pathsep.join(map(str, (root,root/'tests')))
    res = subprocess.run([sys.executable, '-c', f'import {module}, torch; print(torch.get_num_threads())'], env=env,
        cwd=root, capture_output=True, text=True)
    assert res.stdout.split()==[str(expected)], res.stderr

@pytest.mark.nbdev
def test_chosen_tests_run_as_often_as_asked(monkeypatch):
    import run
    ran = []
    monkeypatch.setattr(run, 'run_notebooks', lambda fns: ran.extend(fns) or [(o.stem, 'passed') for o in fns])
    monkeypatch.setattr(run, 'run_tests', lambda fns: ran.extend(fns) or [(o.stem, 'passed') for o in fns])
    assert not run.main('sizes', times=3)
    assert sorted(o.stem.lstrip('0123456789_') for o in ran)==['sizes']*3+['test_sizes']*3

@pytest.mark.nbdev
def test_a_run_ends_with_what_failed_and_the_count(monkeypatch, capsys):
    import run
    monkeypatch.setattr(run, 'run_notebooks', lambda fns: [('a.ipynb','passed'), ('b.ipynb','failed')])
    monkeypatch.setattr(run, 'run_tests', lambda fns: [('test_c::d','failed'), ('test_c::e','skipped')])
    assert run.main('sizes')
    assert capsys.readouterr().out.splitlines()==['FAILED b.ipynb', 'FAILED test_c::d', '1 passed, 2 failed, 1 skipped']
    monkeypatch.setattr(run, 'run_tests', lambda fns: [])
    assert run.main()
    assert capsys.readouterr().out.splitlines()[1:]==['FAILED no tests were run', '1 passed, 2 failed']

outcomes = """
import os, pytest
@pytest.fixture
def bad():
    yield
    raise ValueError
def test_good(): pass
def test_wrong(): assert False
def test_ends_badly(bad): pass
@pytest.mark.parametrize('o', [1,2])
def test_skipped(o): pytest.skip()
"""
def test_outcomes_of_a_file(tmp_path):
    "Each test counts once; a file that dies, or that cannot be read, has failed"
    import run
    def outs(code, path=tmp_path/'test_it.py'):
        path.write_text(code)
        return [(nm.rpartition('::')[2], o) for nm,o in run.run_pytest(path)[0]]
    assert outs(outcomes)==[('test_good','passed'), ('test_wrong - assert False','failed'),
        ('test_ends_badly - failed on teardown with "ValueError"','failed'),
        ('test_skipped[1]','skipped'), ('test_skipped[2]','skipped')]
    assert outs('')==[]
    for code in ('def test_dies():\n    import os\n    os._exit(3)', 'def test_('):
        assert [o for _,o in outs(code)]==['failed']
