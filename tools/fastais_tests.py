"""Run fastai's own tests with and without the patches: `python tools/fastais_tests.py CLONE_OF_FASTAI`.

fastai's tests are the cells of its notebooks. Cells that are exported are left out: what they define comes from the
installed fastai, as it is or patched. Cells marked as slow or for a GPU do not run. Prints how many cells pass, and
each cell that passes in one of the two only. Cells that need a download fail in both, where there is no network.
"""
import argparse, json, os, re, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

root = Path(__file__).resolve().parent.parent
# Cells that do not run: code that is exported, what needs a GPU or minutes, and what exports the notebook
left_out = re.compile(r'^#\s*\|?\s*(export\w*|eval:\s*false|slow|cuda|distributed|skip|multicuda)\b|nbdev_export', re.M)

def cells(nb):
    "The code that a notebook tests with, cell by cell, and its module"
    found = json.loads(nb.read_text(encoding='utf-8'))['cells']
    sources = [''.join(o['source']) for o in found if o['cell_type']=='code']
    module = next((m[1] for o in sources if (m := re.search(r'^#\s*\|?\s*default_exp\s+(\S+)', o, re.M))), None)
    return [o for o in sources if o.strip() and not left_out.search(o)],module

def run_here(nb):
    "Run the cells of a notebook in this process; print what each that fails says"
    from execnb.shell import CaptureShell
    todo,module = cells(Path(nb))
    shell = CaptureShell()
    star = f'import fastai.{module} as _m; globals().update({{k:v for k,v in vars(_m).items() if k[:2]!="__"}})'
    shell.run(star)
    for i,o in enumerate(todo):
        shell.exc = None
        shell.run(o)
        shell.run(star) if i==0 else None
        print('CELL', json.dumps([i, bool(shell.exc), o.strip()[:100], repr(shell.exc)[:160]]), flush=True)

def run(nb, lib):
    "What became of each cell, with the fastai in the folder `lib`"
    env = os.environ | dict(PYTHONPATH=str(lib), OMP_NUM_THREADS='1', MPLBACKEND='agg')
    with tempfile.TemporaryDirectory() as tmp:
        try:
            out = subprocess.run([sys.executable,'-W','ignore',__file__,'--nb',str(nb)], env=env, cwd=tmp, timeout=300,
                stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
        except subprocess.TimeoutExpired as e: out = (e.stdout or b'').decode()
    return {i:(bad,src,why) for i,bad,src,why in (json.loads(l[5:]) for l in out.splitlines() if l.startswith('CELL '))}

def main(clone):
    notebooks = [o for o in sorted(Path(clone).glob('nbs/*.ipynb')) if cells(o)[1]]
    with tempfile.TemporaryDirectory() as tmp:
        libs = [Path(tmp)/o for o in ('stock','patched')]
        for o in libs: shutil.copytree(Path(find_spec('fastai').origin).parent, o/'fastai')
        env = os.environ | dict(GIT_CEILING_DIRECTORIES=tmp)
        for o in sorted(root.glob('upstream/*.patch')):
            subprocess.run(['git','apply',o], cwd=libs[1], env=env, check=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = [list(pool.map(run, notebooks, [lib]*len(notebooks))) for lib in libs]
    n_pass = [sum(not bad for o in res for bad,*_ in o.values()) for res in results]
    n = sum(len(o) for o in results[0])
    changed = 0
    for nb,a,b in zip(notebooks, *results):
        print(f'{nb.stem:36} {sum(not o[0] for o in a.values()):4} {sum(not o[0] for o in b.values()):4} of {len(a)}')
        for i in sorted(a.keys()|b.keys()):
            if (a.get(i) or (None,))[0]!=(b.get(i) or (None,))[0]:
                changed += 1
                print('   ', i, *(f'{nm}: {o[2] if o[0] else "passes"}' if o else f'{nm}: not run' for nm,o in
                    (('stock',a.get(i)),('patched',b.get(i)))), (a.get(i) or b.get(i))[1], sep='\n      ')
    print(f'{n} cells of {len(notebooks)} notebooks: {n_pass[0]} pass with fastai as it is, {n_pass[1]} with the '
        f'patches; {changed} differ')

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('clone', nargs='?')
    parser.add_argument('--nb', help=argparse.SUPPRESS)
    args = parser.parse_args()
    run_here(args.nb) if args.nb else main(args.clone)
