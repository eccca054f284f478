"""A release has one version everywhere, and a complete sdist with its metadata

Workflows use pinned actions.
"""
import json, os, re, shutil, subprocess, sys, tarfile
from importlib.metadata import metadata
from pathlib import Path
import fastaccum, pytest
from common import files_of_git
from packaging.requirements import Requirement
from packaging.version import Version
from readme import project

root = Path(__file__).resolve().parent.parent
version = fastaccum.__version__

def text_of(name): return (root/name).read_text(encoding='utf-8')
min_python = project()['requires-python'].removeprefix('>=')
required = [re.fullmatch(r'([\w-]+)>=([\d.]+)', o).groups() for o in project()['dependencies']]
pythons = [o.rpartition(' ')[2] for o in project()['classifiers'] if 'Python :: 3.' in o]

# The facts about the package, as in pyproject.toml and as each of three tools sees them

urls = project()['urls']
facts = dict(name=project()['name'], version=version, author=project()['authors'][0]['name'],
    repository=urls['Repository'], docs=urls['Documentation'])
more_facts = dict(description=project()['description'], keywords=project()['keywords'],
    python=min_python)

def seen_by_nbdev():
    from nbdev.config import get_config
    cfg = get_config(root)
    return dict(name=cfg.lib_name, version=cfg.version, author=cfg.author, repository=cfg.git_url,
        docs=cfg.doc_url, description=cfg.description, keywords=cfg.keywords, python=cfg.min_python)

def seen_by_pip():
    data = metadata('fastaccum')
    urls = dict(o.split(', ') for o in data.get_all('Project-URL'))
    return dict(name=data['Name'], version=data['Version'], author=data['Author'],
        repository=urls['Repository'], docs=urls['Documentation'], description=data['Summary'],
        keywords=data['Keywords'].split(','), python=data['Requires-Python'].removeprefix('>='))

def seen_by_the_site():
    pytest.importorskip('sphinx', reason='Sphinx, of the extra `docs`, is not installed')
    code = ('import conf, json; print(json.dumps(dict(name=conf.project, version=conf.release, '
        'author=conf.author, repository=conf.repository, docs=conf.html_baseurl)))')
    env = os.environ|{'PYTHONPATH': os.pathsep.join([str(root/'docs'), str(root)])}
    return json.loads(subprocess.check_output([sys.executable, '-W', 'ignore', '-c', code], env=env))

@pytest.mark.nbdev
@pytest.mark.parametrize('seen,expected',
    [(seen_by_nbdev, facts|more_facts), (seen_by_pip, facts|more_facts), (seen_by_the_site, facts)])
def test_each_tool_sees_the_facts_of_pyproject(seen, expected):
    "If `seen_by_pip` fails after an edit of pyproject.toml, run `pip install -e '.[dev,docs]'`"
    assert seen()==expected

def test_the_installed_package_has_the_requirements_of_pyproject():
    "If this fails after an edit of pyproject.toml, run `pip install -e '.[dev,docs]'`"
    extras = project()['optional-dependencies']
    of_extras = [f'{o}; extra == "{extra}"' for extra,packages in extras.items() for o in packages]
    expected = project()['dependencies']+of_extras
    installed = metadata('fastaccum').get_all('Requires-Dist')
    assert {str(Requirement(o)) for o in installed}=={str(Requirement(o)) for o in expected}

def test_every_file_has_the_same_version():
    "Between releases, the version is that of the next one and ends with `.dev0`; other files name the last one"
    headings = re.findall(r'^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$', text_of('CHANGELOG.md'), re.M)
    is_between = version.endswith('.dev0')
    if is_between: assert headings.pop(0)==('Unreleased','')
    released,day = headings[0]
    assert Version(version)>Version(released) if is_between else version==released
    assert f'\nversion: {released}\ndate-released: {day}\n' in text_of('CITATION.cff')
    assert f'  version: "{released}"\n' in text_of('conda/recipe.yaml')

def test_conda_and_the_oldest_versions_have_the_requirements_of_pyproject():
    run = re.search(r'^  run:\n((?:    - .+\n)+)', text_of('conda/recipe.yaml'), re.M)[1].split('    - ')
    names = dict(torch='pytorch')
    assert [o.strip() for o in run[2:]]==[f'{names.get(o, o)} >={bound}' for o,bound in required]
    assert f'python_min: "{min_python}"' in text_of('conda/recipe.yaml')
    assert re.findall(r'^(\w+)==(.+)\.\*$', text_of('tests/oldest.txt'), re.M)==required

def test_each_python_is_tested():
    assert pythons[0]==min_python
    def tested(workflow):
        return json.loads(re.search(r'python: (\[.+\])', text_of(f'.github/workflows/{workflow}.yml'))[1])
    assert tested('test')==pythons and tested('release')==[pythons[0],pythons[-1]]

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
        info = tar.extractfile(f'fastaccum-{version}/PKG-INFO').read().decode()
    return names,inside,info

def test_the_sdist_has_the_files_of_git(sdist):
    "Whoever packages fastaccum for a distribution can run the tests, which read files of all folders"
    names,inside,_ = sdist
    not_needed = re.compile(r'\.ci/|\.devcontainer/|\.gitattributes$|\.gitignore$')
    assert [o for o in names if o not in inside and not not_needed.match(o)]==[]
    assert not [o for o in inside if re.search(r'\.pyc|/models/|^\.(?!github/)', o)]

def test_the_metadata_has_the_links_and_pictures_for_the_package_index(sdist):
    info = sdist[2]
    for o in pythons: assert f'Classifier: Programming Language :: Python :: {o}\n' in info
    for name in ('Repository','Documentation','Changelog','Issues'):
        assert f'Project-URL: {name}, https://' in info
    pictures = re.findall(r'!\[[^]]*\]\(([^)]+)\)', info)
    assert pictures and all(o.startswith('https://') for o in pictures)

def test_each_action_is_pinned_to_one_commit():
    used = {m for fn in (root/'.github/workflows').glob('*.yml')
        for m in re.findall(r'uses: ([^.\s@]+)(?:@(\S+))?(?: # (v[\d.]+)$)?', fn.read_text(encoding='utf-8'), re.M)}
    assert used and all(re.fullmatch('[0-9a-f]{40}', sha) and v for _,sha,v in used), used
    assert len({name for name,*_ in used})==len(used), used
