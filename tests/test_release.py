"What becomes of a tag: the tool that makes one, what is uploaded, and what the workflows are made of."
import json, re, shutil, subprocess, sys, tarfile
from pathlib import Path
import pytest
from fastcore.basics import noop
from common import files_of_git

root = Path(__file__).resolve().parent.parent
import release

def text_of(nm): return (root/nm).read_text(encoding='utf-8')
def setting(nm): return re.search(fr'^{nm} *= *(.+)$', text_of('settings.ini'), re.M)[1]
def pythons():
    oldest,newest = (int(setting(o).split('.')[1]) for o in ('min_python','max_python'))
    return [f'3.{o}' for o in range(oldest, newest+1)]

# The tool, in a clone

def git(*args, cwd):
    who = ['-c','user.name=a','-c','user.email=a@b','-c','commit.gpgsign=false','-c','tag.gpgsign=false']
    return subprocess.run(['git',*who,*args], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()

added = '### Added\n\n- A cache.\n'

@pytest.fixture
def clone(tmp_path, monkeypatch):
    "A repository of the files that a release is about, with something to tell"
    for nm in (*release.places,'pyproject.toml','README.md','tools/release.py'):
        (tmp_path/nm).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/nm, tmp_path/nm)
    (tmp_path/release.lib).write_text('__version__ = "0.3.0"\n')
    (tmp_path/'CHANGELOG.md').write_text(f'# Changelog\n\n## [Unreleased]\n\n{added}\n## [0.3.0] - 2026-01-01\n\n'
        f'- It began.\n\n[Unreleased]: {release.repository()}/compare/v0.3.0...HEAD\n')
    git('init','-q', cwd=tmp_path); git('add','-A', cwd=tmp_path); git('commit','-qm','a', cwd=tmp_path)
    for o in ('AUTHOR_NAME','AUTHOR_EMAIL','COMMITTER_NAME','COMMITTER_EMAIL'): monkeypatch.setenv(f'GIT_{o}', 'a')
    return tmp_path

def run(clone, *args):
    res = subprocess.run([sys.executable,'tools/release.py',*args], cwd=clone, capture_output=True, text=True)
    return res.returncode,res.stdout,res.stderr

@pytest.mark.parametrize('new', ['0.4.0','0.10.0'])
def test_a_release_is_a_commit_and_a_tag(clone, new):
    "Nothing is pushed; the tag agrees with the version and with the changelog's section, and no other does"
    code,out,err = run(clone, '--checks', '', new)
    assert not code and f'git push --atomic origin HEAD v{new}' in out, err
    assert git('describe', cwd=clone)==f'v{new}' and git('status','--porcelain', cwd=clone)==''
    assert git('cat-file','-t',f'v{new}', cwd=clone)=='tag' and git('remote', cwd=clone)==''
    text,url = (clone/'CHANGELOG.md').read_text(),release.repository()
    assert re.search(fr'## \[Unreleased\]\n\n## \[{new}\] - \d{{4}}-\d\d-\d\d\n\n{re.escape(added)}', text)
    assert text.endswith(f'[Unreleased]: {url}/compare/v{new}...HEAD\n[{new}]: {url}/compare/v0.3.0...v{new}\n')
    assert run(clone, '--agree', f'v{new}')[:2]==(0,added) and run(clone, '--agree', 'v0.3.0')[0]
    for nm in release.places: assert new in (clone/nm).read_text() and '0.3.0' not in (clone/nm).read_text()

def test_a_version_that_the_files_have_is_tagged_where_it_is(clone):
    "As 0.2.0 was, which came with its section of the changelog; a second time there is a tag already"
    before = git('rev-parse','HEAD', cwd=clone)
    assert not run(clone, '--checks', '', '0.3.0')[0]
    assert git('rev-list','-1','v0.3.0', cwd=clone)==before==git('rev-parse','HEAD', cwd=clone)
    assert 'a tag v0.3.0' in run(clone, '--checks', '', '0.3.0')[2] and git('status','--porcelain', cwd=clone)==''

def test_the_version_has_a_dated_section():
    "In the tree as it is, and the same day in the citation"
    day = re.search(fr'^## \[{release.version()}\] - (\d{{4}}-\d\d-\d\d)$', text_of('CHANGELOG.md'), re.M)[1]
    assert f'date-released: {day}\n' in text_of('CITATION.cff')
    assert all(release.version() in text_of(nm) for nm in release.places)

def unclean(clone): (clone/'new.py').touch()
def tagged(clone): git('tag','v0.4.0', cwd=clone)
def untold(clone):
    (clone/'CHANGELOG.md').write_text((clone/'CHANGELOG.md').read_text().replace(added, ''))
    git('commit','-qam','b', cwd=clone)

@pytest.mark.parametrize('change,new,why', [(noop,'0.2.9','does not come after'), (noop,'0.4.0rc1','no version'),
    (unclean,'0.4.0','not committed'), (untold,'0.4.0','Unreleased'), (tagged,'0.4.0','a tag v0.4.0'),
    (noop,'0.4.0 dist','this failed')])   # there is no package here that could be built
def test_refused_and_everything_is_as_it_was(clone, change, new, why):
    change(clone)
    def state(): return [git(*o, cwd=clone) for o in (('status','--porcelain'),('tag',),('rev-parse','HEAD'))]
    before,(new,_,checks) = state(),new.partition(' ')
    code,_,err = run(clone, '--checks', checks, new)
    assert code and why in err and '0.3.0' in (clone/release.lib).read_text() and before==state()

# What is uploaded

def test_the_recipe_asks_for_what_settings_ask_for():
    text = text_of('conda/recipe.yaml')
    needed = re.search(r'^  run:\n((?:    - .+\n)+)', text, re.M)[1].replace('    - ', '').splitlines()
    asked = [re.match(r'([\w-]+)(.*)', o).groups() for o in setting('requirements').split()]
    assert needed==['python >=${{ python_min }}',
        *(f'{"pytorch" if nm=="torch" else nm} {bound}' for nm,bound in asked)]
    assert f'python_min: "{setting("min_python")}"' in text

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The metadata and the names in the sdist, made of the files that git has"
    asked = re.search(r'^requires = \["setuptools>=(\d+)"\]', text_of('pyproject.toml'), re.M)[1]
    pytest.importorskip('setuptools', minversion=asked)   # an older one may have come with this Python
    tmp,names = tmp_path_factory.mktemp('built'),files_of_git()
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
    for o in pythons(): assert f'Classifier: Programming Language :: Python :: {o}\n' in text
    for nm in ('Repository','Documentation','Changelog','Issues'): assert f'Project-URL: {nm}, https://' in text
    assert all(o.startswith('https://') for o in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text))   # pictures, too

# The workflows

def test_each_python_is_tested():
    assert json.loads(re.search(r'python: (\[.+\])', text_of('.github/workflows/test.yml'))[1])==pythons()

def test_actions_are_pinned_and_each_to_one_commit():
    used = {m for fn in (root/'.github/workflows').glob('*.yml')
        for m in re.findall(r'uses: ([^.\s@]+)(?:@(\S+))?(?: # (v[\d.]+)$)?', fn.read_text(encoding='utf-8'), re.M)}
    assert used and all(re.fullmatch('[0-9a-f]{40}', sha) and v for nm,sha,v in used), used
    assert len({nm for nm,*_ in used})==len(used), used
