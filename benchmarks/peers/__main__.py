"""Run the peers and write what came of it: `python -m benchmarks.peers [right] [fast] [--only NAME]`, or `make peers`.

A full run writes Markdown and JSON into benchmarks/results; with --only a table is printed, and nothing written."""
import argparse, importlib, json, os, subprocess, sys, tempfile, warnings
from importlib.metadata import version
from pathlib import Path
warnings.filterwarnings('ignore')

modules = ['bare','fastai','fastxtend','lightning','accelerate','transformers','composer','fastaccum']
results = Path(__file__).resolve().parents[1]/'results'

def peers_of(module): return importlib.import_module(f'.{module}', __package__).peers

def child(module, out):
    "The cases with one module's peers, in a process of its own: some change others by being imported"
    from . import right
    import torch
    torch.set_num_threads(1)
    res = {}
    for p in peers_of(module):
        print(f'{p.title} {version_of(p)}', flush=True)
        res[p.key] = dict(title=p.title, how=p.how, docs=p.docs, version=version_of(p),
            cases=right.run_all(p, say=lambda s: print(s, flush=True)))
    Path(out).write_text(json.dumps(res))

def version_of(peer):
    import fastaccum
    return fastaccum.__version__ if peer.package=='fastaccum' else version(peer.package)

def run_right(names, note):
    from .cases import cases
    from .report import about
    res = dict(about=about(note), cases={c.key:c.title for c in cases}, peers={})
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
    parser.add_argument('--only', help=f'one of {", ".join(modules)}')
    parser.add_argument('--note', help='a remark to go into the results')
    for o in ('--child','--out'): parser.add_argument(o, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child: return child(args.child, args.out)
    names = [o for o in modules if args.only is None or o==args.only]
    if not names: sys.exit(f'--only {args.only}: give one of {", ".join(modules)}')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    from . import report
    for what in args.what or ['right','fast']:
        if what=='right': res = run_right(names, args.note)
        else:
            from .fast import run_fast
            res = dict(about=report.about(args.note))|run_fast(names)
        text = getattr(report, what)(res)
        print(f'\n{text}')
        if args.only is None:
            results.mkdir(exist_ok=True)
            (results/f'{what}.json').write_text(json.dumps(res, indent=1)+'\n')
            (results/f'{what}.md').write_text(text+'\n')

if __name__=='__main__': main()
