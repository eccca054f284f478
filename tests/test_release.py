"What becomes of a tag: the tool that makes one, what is uploaded, and what the workflows are made of."
import json, re, shutil, subprocess, sys, tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
import pytest
from fastcore.basics import noop

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tools'))
import release

toml,ini = ((root/o).read_text(encoding='utf-8') for o in ('pyproject.toml','settings.ini'))
def setting(nm): return re.search(fr'^{nm} *= *(.+)$', ini, re.M)[1]
def workflows(): return sorted((root/'.github/workflows').glob('*.yml'))

# The tool, in a clone

def git(*args, cwd):
    who = ['-c','user.name=a','-c','user.email=a@b','-c','commit.gpgsign=false','-c','tag.gpgsign=false']
    return subprocess.run(['git',*who,*args], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()

@pytest.fixture
def clone(tmp_path, monkeypatch):
    "A repository of the files that a release is about, with something to tell, where no check is made"
    for nm in (*release.places,'CHANGELOG.md','pyproject.toml','README.md','tools/release.py'):
        (tmp_path/nm).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/nm, tmp_path/nm)
    (tmp_path/release.lib).write_text('__version__ = "0.3.0"\n')
    (tmp_path/'CHANGELOG.md').write_text('# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A door.\n\n'
        f'## [0.3.0] - 2026-01-01\n\n- It began.\n\n[Unreleased]: {release.repository()}/compare/v0.3.0...HEAD\n'
        f'[0.3.0]: {release.repository()}/releases/tag/v0.3.0\n')
    git('init','-q', cwd=tmp_path); git('add','-A', cwd=tmp_path); git('commit','-qm','a', cwd=tmp_path)
    for k in ('AUTHOR','COMMITTER'):
        for o in ('NAME','EMAIL'): monkeypatch.setenv(f'GIT_{k}_{o}', 'a')
    return tmp_path

def run(clone, *args):
    res = subprocess.run([sys.executable,'tools/release.py',*args], cwd=clone, capture_output=True, text=True)
    return res.returncode,res.stdout,res.stderr

def make(clone, *args): return run(clone, '--checks', '', *args)

def test_a_release_is_a_commit_and_a_tag(clone):
    code,out,err = make(clone, '0.4.0')
    assert not code and 'git push --atomic origin HEAD v0.4.0' in out, err
    assert git('describe', cwd=clone)=='v0.4.0' and git('status','--porcelain', cwd=clone)==''
    assert git('cat-file','-t','v0.4.0', cwd=clone)=='tag' and git('remote', cwd=clone)==''
    changed = git('show','--format=','--name-only','HEAD', cwd=clone).split()
    assert sorted(changed)==sorted([*release.places,'CHANGELOG.md'])
    text = (clone/'CHANGELOG.md').read_text()
    assert re.search(r'## \[Unreleased\]\n\n## \[0\.4\.0\] - \d{4}-\d\d-\d\d\n\n### Added\n\n- A door\.\n', text)
    assert text.endswith(f'[Unreleased]: {release.repository()}/compare/v0.4.0...HEAD\n'
        f'[0.4.0]: {release.repository()}/compare/v0.3.0...v0.4.0\n'
        f'[0.3.0]: {release.repository()}/releases/tag/v0.3.0\n')
    assert run(clone, '--agree', 'v0.4.0')[:2]==(0,'### Added\n\n- A door.\n')
    for nm in release.places: assert '0.4.0' in (clone/nm).read_text() and '0.3.0' not in (clone/nm).read_text()

def unclean(clone): (clone/'new.py').touch()
def tagged(clone): git('tag','v0.4.0', cwd=clone)
def untold(clone):
    text = (clone/'CHANGELOG.md').read_text().replace('### Added\n\n- A door.\n\n', '')
    (clone/'CHANGELOG.md').write_text(text)
    git('commit','-qam','b', cwd=clone)

@pytest.mark.parametrize('change,new,why', [(noop,'0.3.0','does not come after'), (noop,'0.2.9','does not come after'),
    (noop,'0.10','no version'), (noop,'v0.4.0','no version'), (noop,'0.4.0rc1','no version'),
    (unclean,'0.4.0','not committed'), (untold,'0.4.0','Unreleased'), (tagged,'0.4.0','a tag v0.4.0'),
    (noop,'0.4.0 dist','this failed')])   # there is no package here that could be built
def test_refused_and_everything_is_as_it_was(clone, change, new, why):
    change(clone)
    before = [git(*o, cwd=clone) for o in (('status','--porcelain'),('tag',),('rev-parse','HEAD'))]
    new,_,checks = new.partition(' ')
    code,_,err = run(clone, '--checks', checks, new)
    assert code and why in err and '0.3.0' in (clone/release.lib).read_text()
    assert before==[git(*o, cwd=clone) for o in (('status','--porcelain'),('tag',),('rev-parse','HEAD'))]

def test_versions_are_numbers_not_words(clone): assert not make(clone, '0.10.0')[0]

@pytest.mark.parametrize('tag', ['v0.4.0','0.3.0','v0.3.0-1'])
def test_a_tag_of_another_version_is_refused(clone, tag):
    assert run(clone, '--agree', 'v0.3.0')[0]==0
    code,_,err = run(clone, '--agree', tag)
    assert code and 'the tag is' in err

def test_a_tag_without_a_section_is_refused(clone):
    (clone/release.lib).write_text('__version__ = "0.4.0"\n')
    code,_,err = run(clone, '--agree', 'v0.4.0')
    assert code and 'nothing under' in err

def test_the_files_here_have_the_places():
    "Each pattern is found once; the next version can be written"
    files = release.written('99.0.0', '2099-01-01')
    assert all(text.count('99.0.0') for text in files.values()) and '2099-01-01' in files['CITATION.cff']
    assert release.version() in (root/'CITATION.cff').read_text(encoding='utf-8')

def test_readmes_example_is_a_program(): compile(release.example(), 'example', 'exec')

# What is uploaded

def recipe():
    text = (root/'conda/recipe.yaml').read_text(encoding='utf-8')
    def listed(under): return re.search(fr'^  {under}:\n((?:    - .+\n)+)', text, re.M)[1].strip().split('\n')
    return text,*([o.strip(' -') for o in listed(under)] for under in ('host','run'))

def test_the_recipe_asks_for_what_settings_ask_for():
    text,host,needed = recipe()
    named = {'torch':'pytorch'}   # other names there
    asked = [re.match(r'([\w-]+)(.*)', o).groups() for o in setting('requirements').split()]
    assert needed==['python >=${{ python_min }}',*(f'{named.get(nm, nm)} {bound}' for nm,bound in asked)]
    built = re.search(r'^requires = \["setuptools(.+)"\]', toml, re.M)[1]
    assert host==['python ${{ python_min }}.*','pip',f'setuptools {built}']
    assert f'python_min: "{setting("min_python")}"' in text and f'version: "{release.version()}"' in text
    assert setting('description') in text and setting('license') in text

def test_the_recipe_of_an_sdist_has_its_hash(tmp_path, monkeypatch):
    sdist = tmp_path/f'fastaccum-{release.version()}.tar.gz'
    sdist.write_bytes(b'x')
    sha = '2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881'
    assert f'sha256: {sha}\n' in release.recipe(sdist)
    with pytest.raises(SystemExit, match='not the sdist'): release.recipe(tmp_path/'fastaccum-0.0.9.tar.gz')

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The metadata and the names in the sdist, made of the files that git has"
    files = subprocess.run(['git','ls-files','-z','--cached','--others','--exclude-standard'], cwd=root,
        capture_output=True, text=True)
    if files.returncode: pytest.skip('not a git checkout')
    asked = int(re.search(r'^requires = \["setuptools>=(\d+)"\]', toml, re.M)[1])
    try: have = version('setuptools')
    except PackageNotFoundError: pytest.skip('setuptools is not installed here')
    if int(have.partition('.')[0])<asked: pytest.skip(f'setuptools {have} came with this Python: {asked} builds')
    tmp = tmp_path_factory.mktemp('built')
    names = [o for o in files.stdout.split('\0') if o and (root/o).is_file()]
    for nm in names:
        (tmp/nm).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/nm, tmp/nm)
    code = 'import setuptools.build_meta as b; print("MADE", b.build_sdist("out"))'
    res = subprocess.run([sys.executable,'-c',code], cwd=tmp, capture_output=True, text=True)
    assert not res.returncode, res.stderr
    with tarfile.open(tmp/'out'/re.search('MADE (.+)', res.stdout)[1]) as tar:
        inside = {o.name.split('/', 1)[1] for o in tar.getmembers() if o.isfile()}
        text = tar.extractfile(next(o for o in tar.getmembers() if o.name.endswith('/PKG-INFO'))).read().decode()
    return names,inside,text

def test_the_sdist_has_the_notebooks_and_the_tests(built):
    names,inside,_ = built
    wanted = {o for o in names if o.split('/')[0] in ('fastaccum','nbs','tests','tools','docs','benchmarks','images',
        'upstream') or o in ('README.md','LICENSE','CHANGELOG.md','settings.ini','setup.py','pyproject.toml')}
    assert sorted(wanted-inside)==[] and not any(re.search(r'\.pyc|/models/|^\.', o) for o in inside)

def test_what_the_package_index_shows(built):
    text = built[2]
    lines = text.splitlines()
    oldest,newest = (int(setting(o).split('.')[1]) for o in ('min_python','max_python'))
    for o in range(oldest, newest+1): assert f'Classifier: Programming Language :: Python :: 3.{o}' in lines
    for nm in ('Repository','Documentation','Changelog','Issues'): assert f'Project-URL: {nm}, https://' in text
    shown = re.findall(r'!\[[^]]*\]\(([^)]+)\)', text)
    assert all(o.startswith('https://') for o in shown)   # also the pictures, at the release's tag
    pictures = [o for o in shown if '/images/' in o]
    assert pictures and all((root/'images'/Path(o).name).is_file() for o in pictures)
    words = re.search('^Keywords: (.+)$', text, re.M)[1].split(',')
    assert {'fastai','gradient accumulation','batch size finder','gradient cache','noise scale'}<=set(words)

# The workflows

def test_each_python_is_tested():
    text = (root/'.github/workflows/test.yml').read_text(encoding='utf-8')
    oldest,newest = (int(setting(o).split('.')[1]) for o in ('min_python','max_python'))
    assert json.loads(re.search(r'python: (\[.+\])', text)[1])==[f'3.{o}' for o in range(oldest, newest+1)]

def test_actions_are_pinned_and_each_to_one_commit():
    used = [(fn.name,*m) for fn in workflows()
        for m in re.findall(r'uses: ([^.\s@]+)(?:@(\S+))?(?: # (v[\d.]+)$)?', fn.read_text(encoding='utf-8'), re.M)]
    assert used and all(re.fullmatch('[0-9a-f]{40}', sha) and v for _,nm,sha,v in used if nm), used
    for nm in {o[1] for o in used}: assert len({o[2:] for o in used if o[1]==nm})==1, nm

def test_a_commit_is_tested_once():
    "A branch is tested by its pull request, and only main by itself"
    for fn in workflows():
        text = fn.read_text(encoding='utf-8')
        if '\n  pull_request' in text: assert '\n  push:\n    branches: [main]\n' in text, fn.name

def test_lint():
    "What ruff says; `make lint` has actionlint and zizmor read the workflows, too"
    ruff = Path(sys.executable).with_name('ruff')
    if not ruff.exists(): pytest.skip('ruff is not installed: make lint')
    res = subprocess.run([ruff,'check','--no-cache'], cwd=root, capture_output=True, text=True)
    assert not res.returncode, res.stdout+res.stderr

def scripts(): return [o for d in ('fastaccum','tests','tools','docs','benchmarks') for o in (root/d).rglob('*.py')]

def test_the_oldest_python_can_read_it():
    import ast
    version = tuple(map(int, setting('min_python').split('.')))
    for fn in scripts(): ast.parse(fn.read_text(encoding='utf-8'), str(fn), feature_version=version)
