"Notebooks, modules and README agree, and no file contains a path of a developer's machine."
import re, shutil, subprocess, sys, sysconfig
from pathlib import Path
import pytest, readme
from common import copy_folder, files_of_git, git

root = Path(__file__).resolve().parent.parent
lib,by_hand = root/'fastaccum',{'__init__.py','all.py'}   # nbdev-export writes all modules but these two

def files(path, ext):
    """Return the texts of all files in the folder `path` whose names end with `ext`, by name

    Line ends are not compared: nbdev writes those of the system, and git commits those of the repository.
    """
    found = sorted(path.rglob(f'*.{ext}'))
    return {o.relative_to(path).as_posix(): o.read_text(encoding='utf-8') for o in found}
def run(cmd, cwd):
    "Run a command that belongs to this Python, such as nbdev-export"
    cmd = shutil.which(cmd, path=sysconfig.get_path('scripts'))   # on Windows, not the folder of the interpreter
    res = subprocess.run([cmd], cwd=cwd, capture_output=True, text=True)
    assert not res.returncode and 'Failed' not in res.stderr, res.stdout+res.stderr

@pytest.fixture
def copy(tmp_path):
    "Return a folder with copies of the notebooks and of the modules that were written by hand"
    copy_folder(root/'nbs', tmp_path/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
    shutil.copy(root/'pyproject.toml', tmp_path)
    def written(_, names): return [o for o in names if o.endswith(('.py','__')) and o not in by_hand]
    copy_folder(lib, tmp_path/'fastaccum', ignore=written)
    return tmp_path

@pytest.mark.nbdev
def test_modules_are_the_notebooks_exports(copy, monkeypatch):
    monkeypatch.delenv('IN_TEST', raising=False)   # nbdev exports nothing if IN_TEST is set
    run('nbdev-export', copy)
    exported,committed = files(copy/'fastaccum', 'py'),files(lib, 'py')
    assert exported.keys()==committed.keys() and [k for k in committed if exported[k]!=committed[k]]==[], 'nbdev-export'

@pytest.mark.nbdev
def test_notebooks_are_clean(copy):
    before = files(copy/'nbs', 'ipynb')
    run('nbdev-clean', copy)
    after = files(copy/'nbs', 'ipynb')
    assert before and [k for k in before if after[k]!=before[k]]==[], 'run nbdev-clean'

def test_the_readme_is_the_page_index(): assert not readme.main(check=True)

def test_a_checkout_on_windows_has_the_same_bytes(tmp_path):
    "Git for Windows sets `core.autocrlf`, which changes the line ends of files without the attribute `eol`"
    names = files_of_git()   # skips the test outside of a git checkout
    for value in ('true','false'):
        cmd = [*git, '-c', f'core.autocrlf={value}', 'checkout-index', '--all', f'--prefix={tmp_path/value}/']
        subprocess.run(cmd, cwd=root, check=True)
    def written(value): return {o: (tmp_path/value/o).read_bytes() for o in names if (tmp_path/value/o).is_file()}
    windows,linux = written('true'),written('false')
    assert windows.keys()==linux.keys() and windows
    assert [o for o in linux if windows[o]!=linux[o]]==[]

def test_the_make_commands_that_files_name_exist():
    targets = re.findall(r'^([a-z-]+):', (root/'Makefile').read_text(encoding='utf-8'), re.M)
    named = re.compile(r'(?:`|run: )make (?:[A-Z]+=\S+ )*([a-z-]+)')
    texts = {o: (root/o).read_text(encoding='utf-8') for o in files_of_git() if not o.endswith('.png')}
    assert [f'{o}: make {name}' for o,text in texts.items() for name in named.findall(text)
        if name not in targets]==[]

def paths_of_machine(*folders):
    """Return a pattern that finds paths within these folders, or within the home folder of any user

    A folder directly below the root, such as /build or /usr, is left out: other paths begin like it.
    """
    # a path begins after a character that cannot belong to a path, or after the \n or \t of a string in
    # a notebook
    start = r'(?:(?<![\w.~-])|(?<=\\[nt]))'
    within = [fr'{re.escape(str(o))}(?![\w.-])' for o in folders if len(o.parts)>2]
    paths = '|'.join([*within, r'/(?:home|Users)/\w+/'])
    return re.compile(fr"{start}(?:{paths}).*".encode())

# the blanks are removed, because this file must not have such a path itself
@pytest.mark.parametrize('text,found', [('/w/ours/nbs',True), ('/w/ours',True), ('see /w/ours/nbs',True),
    ('/ home/ann/x',True), (r'"a\n/ Users/ann/x"',True), ('/w/ours-site',False), ('/w/other',False),
    ('/usr/bin/env',False), ('https://a.org/w/ours',False)])
def test_paths_of_a_machine_are_found(text, found):
    text = text.replace('/ ', '/').encode()
    assert bool(paths_of_machine(Path('/w/ours'), Path('/usr')).search(text))==found

def test_no_file_has_a_path_of_a_machine_or_is_large():
    "Files have at most 2 MiB, and no path of this checkout, of its environment or of a home folder"
    found = paths_of_machine(root, Path(sys.prefix))
    names = files_of_git()
    assert [o for o in names if (root/o).stat().st_size>2**21]==[]
    assert [f'{o}: {m[0].decode()}' for o in names for m in found.finditer((root/o).read_bytes())]==[]
