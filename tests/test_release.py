"""A release has one version everywhere, and a complete sdist with its metadata

Workflows use pinned actions.
"""
import configparser, json, re, shutil, subprocess, sys, tarfile
from pathlib import Path
import fastaccum, pytest
from common import files_of_git

root = Path(__file__).resolve().parent.parent
version = fastaccum.__version__

def text_of(name): return (root/name).read_text(encoding='utf-8')
config = configparser.ConfigParser(delimiters='=', interpolation=None)
config.read(root/'settings.ini', encoding='utf-8')
settings = config['DEFAULT']
required = [re.fullmatch(r'([\w-]+)>=([\d.]+)', o).groups() for o in settings['requirements'].split()]
pythons = [o.rpartition(' ')[2] for o in settings['classifiers'].splitlines() if 'Python :: 3.' in o]

def test_every_file_has_the_same_version():
    day = re.search(fr'^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$', text_of('CHANGELOG.md'), re.M)[1]
    assert f'\nversion: {version}\ndate-released: {day}\n' in text_of('CITATION.cff')
    assert f'  version: "{version}"\n' in text_of('conda/recipe.yaml')

def test_conda_and_the_oldest_versions_have_the_requirements_of_settings():
    run = re.search(r'^  run:\n((?:    - .+\n)+)', text_of('conda/recipe.yaml'), re.M)[1].split('    - ')
    names = dict(torch='pytorch')
    assert [o.strip() for o in run[2:]]==[f'{names.get(o, o)} >={bound}' for o,bound in required]
    assert f'python_min: "{settings["min_python"]}"' in text_of('conda/recipe.yaml')
    assert re.findall(r'^(\w+)==(.+)\.\*$', text_of('tests/oldest.txt'), re.M)==required

def test_each_python_is_tested():
    assert pythons[0]==settings['min_python']
    assert json.loads(re.search(r'python: (\[.+\])', text_of('.github/workflows/test.yml'))[1])==pythons

@pytest.fixture(scope='module')
def sdist(tmp_path_factory):
    """Build an sdist from the files of git

    Return the names of these files, the names in the sdist, and its metadata.
    """
    needed = re.search(r'^requires = \["setuptools>=(\d+)"\]', text_of('pyproject.toml'), re.M)[1]
    pytest.importorskip('setuptools', minversion=needed)
    tmp,names = tmp_path_factory.mktemp('sdist'),files_of_git()
    for name in names:
        (tmp/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/name, tmp/name)
    code = 'import setuptools.build_meta as build; build.build_sdist("out")'
    res = subprocess.run([sys.executable, '-c', code], cwd=tmp, capture_output=True, text=True)
    assert not res.returncode, res.stderr
    with tarfile.open(tmp/f'out/fastaccum-{version}.tar.gz') as tar:
        inside = {o.name.partition('/')[2] for o in tar.getmembers() if o.isfile()}
        metadata = tar.extractfile(f'fastaccum-{version}/PKG-INFO').read().decode()
    return names,inside,metadata

def test_the_sdist_has_the_files_of_git(sdist):
    names,inside,_ = sdist
    not_needed = re.compile(r'\.(ci|devcontainer|git)|SECURITY.md|conda/')
    assert [o for o in names if o not in inside and not not_needed.match(o)]==[]
    assert not [o for o in inside if re.search(r'\.pyc|/models/|^\.', o)]

def test_the_metadata_has_the_links_and_pictures_for_the_package_index(sdist):
    metadata = sdist[2]
    for o in pythons: assert f'Classifier: Programming Language :: Python :: {o}\n' in metadata
    for name in ('Repository','Documentation','Changelog','Issues'): assert f'Project-URL: {name}, https://' in metadata
    pictures = re.findall(r'!\[[^]]*\]\(([^)]+)\)', metadata)
    assert pictures and all(o.startswith('https://') for o in pictures)

def test_each_action_is_pinned_to_one_commit():
    used = {m for fn in (root/'.github/workflows').glob('*.yml')
        for m in re.findall(r'uses: ([^.\s@]+)(?:@(\S+))?(?: # (v[\d.]+)$)?', fn.read_text(encoding='utf-8'), re.M)}
    assert used and all(re.fullmatch('[0-9a-f]{40}', sha) and v for _,sha,v in used), used
    assert len({name for name,*_ in used})==len(used), used
