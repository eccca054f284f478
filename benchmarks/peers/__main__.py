"""Run the peers and write what came of it for the pages: `python -m benchmarks.peers [right] [fast]`, or `make peers`.

With --only a table is printed, and nothing is written."""
import argparse, importlib, json, subprocess, sys, tempfile, warnings
from importlib.metadata import version
from pathlib import Path
warnings.filterwarnings('ignore')
from .. import made, save

modules = ['bare','fastai','fastxtend','lightning','accelerate','transformers','composer','fastaccum']

def version_of(peer):
    import fastaccum
    return fastaccum.__version__ if peer.package=='fastaccum' else version(peer.package)

def child(module, out):
    "The cases with one module's peers, in a process of its own: some change others by being imported"
    from . import right
    import torch
    torch.set_num_threads(1)
    res = {}
    for p in importlib.import_module(f'.{module}', __package__).peers:
        print(f'{p.title} {version_of(p)}', flush=True)
        res[p.key] = dict(title=p.title, how=p.how, docs=p.docs, version=version_of(p), cases=right.run_all(p))
    Path(out).write_text(json.dumps(res))

def run_right(names, note):
    from .cases import cases
    res = dict(made=made(*note), cases={c.key:c.title for c in cases}, peers={})
    for nm in names:
        with tempfile.TemporaryDirectory() as tmp:
            out,log = Path(tmp)/'out.json',Path(tmp)/'log'
            cmd = [sys.executable,'-W','ignore','-m',__package__,'--child',nm,'--out',str(out)]
            with log.open('w') as f: done = subprocess.run(cmd, stderr=f)
            if done.returncode: sys.exit(f'{nm} could not be run:\n{log.read_text()[-2000:]}')
            res['peers'].update(json.loads(out.read_text()))
    return res

def main():
    parser = argparse.ArgumentParser(prog='python -m benchmarks.peers', description=__doc__.splitlines()[0])
    parser.add_argument('what', nargs='*', choices=['right','fast',[]], help='default: both')
    parser.add_argument('--only', choices=modules)
    parser.add_argument('--note', action='append', default=[], help='a remark to go into the results')
    for o in ('--child','--out'): parser.add_argument(o, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child: return child(args.child, args.out)
    from . import fast, report
    names = [args.only] if args.only else modules
    for what in args.what or ['right','fast']:
        res = (run_right if what=='right' else fast.run_fast)(names, args.note)
        print(f'\n{getattr(report, what)(res)}')
        if not args.only: save(what, res)

if __name__=='__main__': main()
