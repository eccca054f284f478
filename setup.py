"What settings.ini says of the package; every fact has one home, and pyproject.toml has the rest."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

def read(fn): return (Path(__file__).parent/fn).read_text(encoding='utf-8')

pkg = 'fastaccum'
settings = ConfigParser(delimiters='=', interpolation=None)
settings.read_string(read('settings.ini'))
cfg = settings['DEFAULT']
suffix = '_requirements'
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature']
version = re.search(r'^__version__ *= *"(.+)"', read(f'{pkg}/__init__.py'), re.M)[1]
oldest,newest = (int(cfg[o].split('.')[1]) for o in ('min_python','max_python'))
# The package index has no files of ours: pictures are shown from the release's tag
repo = re.search(r'^Repository *= *"https://github.com/(.+)"', read('pyproject.toml'), re.M)[1]
pictures = f'https://raw.githubusercontent.com/{repo}/v{version}'

setup(
    version=version,
    description=cfg['description'],
    long_description=re.sub(r'\]\((images/[^)]+)\)', fr']({pictures}/\1)', read('README.md')),
    long_description_content_type='text/markdown',
    keywords=[o.strip() for o in cfg['keywords'].split(',')],
    author=cfg['author'],
    license_expression=cfg['license'],
    classifiers=[
        f'Development Status :: {statuses[cfg.getint("status")-1]}',
        f'Intended Audience :: {cfg["audience"]}',
        'Intended Audience :: Science/Research',
        f'Natural Language :: {cfg["language"]}',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        *(f'Programming Language :: Python :: 3.{o}' for o in range(oldest, newest+1)),
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=[pkg, f'{pkg}.*']),
    install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix(suffix): v.split() for k,v in cfg.items() if k.endswith(suffix)},
    entry_points={'nbdev': [f'{pkg} = {pkg}._modidx:d']},   # links to the source and the docs, found by nbdev
)
