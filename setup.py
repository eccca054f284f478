"""Give PyPI the text of README.md, with pictures that it can show; the rest is in pyproject.toml

settings.ini has the address of the pictures.
"""
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

here = Path(__file__).parent
settings = ConfigParser(interpolation=None)
settings.read(here/'settings.ini', encoding='utf-8')
readme = (here/'README.md').read_text(encoding='utf-8')
setup(
    long_description=readme.replace('](images/', f']({settings["DEFAULT"]["pictures"]}'),
    long_description_content_type='text/markdown',
)
