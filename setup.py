"What settings.ini says of the package. Every fact has one home: pyproject.toml has the name, the version and the URLs."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters='=', interpolation=None)
config.read(here/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']

# README.md shows the pictures of this folder; PyPI, which has no such folder, needs their addresses
readme = (here/'README.md').read_text(encoding='utf-8')
readme = readme.replace('](images/', '](https://raw.githubusercontent.com/fastaccum/fastaccum/main/images/')

setup(
    description=cfg['description'],
    long_description=readme,
    long_description_content_type='text/markdown',
    keywords=cfg['keywords'].split(', '),
    author=cfg['author'],
    license_expression=cfg['license'],
    classifiers=cfg['classifiers'].strip().splitlines(),
    python_requires=f'>={cfg["min_python"]}',
    packages=find_packages(include=['fastaccum', 'fastaccum.*']),
    install_requires=cfg['requirements'].split(),
    extras_require={o: cfg[f'{o}_requirements'].split() for o in ('wandb','tensorboard','dev','docs')},
    entry_points={'nbdev': ['fastaccum = fastaccum._modidx:d']},   # nbdev finds the links to source and docs by this
)
