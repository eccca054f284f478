"""Run the set-ups, all or those that are named, and write the results and the table

With `--table`, write only the table, from the results that are there, with what the set-ups are called now."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, json, platform, warnings
from datetime import date
from pathlib import Path
import fastai, torch
import fastaccum
from . import images, texts, tables, series, views, gans, callbacks   # noqa: F401
from .data import set_ups
from .report import checked, counts, table, verdict
from .run import run

out = Path(__file__).resolve().parent.parent/'results'

def write(res):
    (out/'set_ups.json').write_text(json.dumps(res, indent=1)+'\n', encoding='utf-8')
    (out/'set_ups.md').write_text(table(res)+'\n', encoding='utf-8')

def main():
    args = argparse.ArgumentParser()
    args.add_argument('names', nargs='*', help='of functions; with some, nothing is written')
    args.add_argument('--table', action='store_true', help='write only the table, from the results that are there')
    args = args.parse_args()
    if args.table:
        res = json.loads((out/'set_ups.json').read_text(encoding='utf-8'))
        for o in res['set_ups']: o['what'] = set_ups[o['name']].what
        return write(res)
    names = args.names
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    found = []
    for nm in names or set_ups:
        o = run(nm)
        found.append(o)
        ways = [f'{k}: {verdict(o[k], set_ups[nm].alone)}' for k in ('loader','split','cache') if k in o]
        print(f"{nm} ({o['seconds']} s)", *ways, f"check: {checked(o['check'])}", sep='\n    ', flush=True)
    print(*(f'{way}: {counts(found, way)}' for way in ('loader','split')), sep='\n')
    if names: return
    versions = {o.__name__:o.__version__ for o in (fastaccum,fastai,torch)} | dict(python=platform.python_version())
    made = ', '.join([f'{date.today()}', *(f'{k} {v}' for k,v in versions.items())])
    write(dict(made=made, set_ups=found))

if __name__=='__main__': main()
