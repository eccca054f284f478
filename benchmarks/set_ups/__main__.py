"Run the set-ups, all or those that are named; if all, write the table."
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, platform, warnings
from datetime import date
from pathlib import Path
import fastai, torch
import fastaccum
from . import images, texts, tables, series, views, gans, callbacks   # noqa: F401
from .data import set_ups
from .report import checked, counts, table, verdict
from .run import run

def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument('names', nargs='*', help='of functions; with some, nothing is written')
    names = args.parse_args().names
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    found = {}
    for nm in names or set_ups:
        found[nm] = o = run(nm)
        ways = [f'{k}: {verdict(o[k], set_ups[nm].alone)}' for k in ('loader','split','cache') if k in o]
        print(nm, *ways, f"check: {checked(o['check'])}", sep='\n    ', flush=True)
    print(*(f'{way}: {counts(found, way)}' for way in ('loader','split')), sep='\n')
    if names: return
    versions = {o.__name__:o.__version__ for o in (fastaccum,fastai,torch)} | dict(python=platform.python_version())
    made = ', '.join([f'{date.today()}', *(f'{k} {v}' for k,v in versions.items())])
    file = Path(__file__).resolve().parents[1]/'results'/'set_ups.md'
    file.write_text(table(found, made)+'\n', encoding='utf-8')

if __name__=='__main__': main()
