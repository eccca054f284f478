"""Run fastai's own tests with and without the patches: `python tools/fastais_tests.py CLONE_OF_FASTAI`.

fastai's tests are the cells of its notebooks. Cells that are exported are left out: what they define comes from the
installed fastai, as it is or patched. Cells marked as slow or for a GPU do not run. A notebook in which a cell passes
in one of the two only runs a second time; chance is no difference. Cells that need a download fail in both, where there
is no network. The result goes to benchmarks/results/fastais_tests.md, unless `--no-save` is given.
"""
import argparse, datetime, json, os, platform, random, re, shutil, signal, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

root = Path(__file__).resolve().parent.parent
saved = root/'benchmarks/results/fastais_tests.md'
seconds = 600   # for a notebook
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
    import numpy as np, torch
    from execnb.shell import CaptureShell
    todo,module = cells(nb)
    shell = CaptureShell()
    star = f'import fastai.{module} as _m; globals().update({{k:v for k,v in vars(_m).items() if k[:2]!="__"}})'
    shell.run(star)
    for i,o in enumerate(todo):
        shell.exc = None
        for seed in (random.seed, np.random.seed, torch.manual_seed): seed(i)
        shell.run(o)
        bad = shell.exc
        if i==0: shell.run(star)
        print('CELL', json.dumps([i, bool(bad), o.strip()[:100], repr(bad)[:160]]), flush=True)

def forked(nb, here, out):
    "Run a notebook in a fork of this process, from the folder `here`; what it prints goes to the file `out`"
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(here)
        for name,fds in ((os.devnull,(0,2)), (out,(1,))):
            fd = os.open(name, os.O_RDWR|os.O_CREAT)
            for o in fds: os.dup2(fd, o)
        try: run_here(nb)
        finally: os._exit(0)
    end = time.time()+seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.time()>end: os.killpg(pid, signal.SIGKILL)
        time.sleep(0.1)

def run_all(notebooks):
    "Run each notebook, with the fastai that this process imports; print what became of its cells, line by line"
    # once, for all: this takes longer than most notebooks
    for o in ('vision','text','tabular'): import_module(f'fastai.{o}.all')
    for nb in map(Path, notebooks):
        with tempfile.TemporaryDirectory() as tmp:
            here,out = Path(tmp)/'nbs',Path(tmp)/'out'   # with the pictures and files that stand beside the notebooks
            shutil.copytree(nb.parent, here, ignore=shutil.ignore_patterns('*.ipynb'))
            forked(nb.resolve(), here, out)
            said = out.read_text(encoding='utf-8', errors='replace').splitlines()
        print('BOOK', json.dumps([json.loads(o[5:]) for o in said if o.startswith('CELL ')]), flush=True)
        print(nb.stem, file=sys.stderr, flush=True)

def run(notebooks, lib):
    "What became of the cells of each notebook, with the fastai in the folder `lib`"
    env = os.environ | dict(PYTHONPATH=str(lib), OMP_NUM_THREADS='1', MPLBACKEND='agg')
    out = subprocess.run([sys.executable,'-W','ignore',__file__,'--run',*map(str, notebooks)], env=env, check=True,
        cwd=lib, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
    books = [json.loads(o[5:]) for o in out.splitlines() if o.startswith('BOOK ')]
    return [{i:(bad,src,why) for i,bad,src,why in o} for o in books]

def differing(a, b):
    "The cells that do not end alike"
    def ended(o): return o and o[0]
    return {i for i in a.keys()|b.keys() if ended(a.get(i))!=ended(b.get(i))}

def both(notebooks, libs):
    "The outcomes of each notebook, with each of `libs`"
    with ThreadPoolExecutor(2) as pool: return list(zip(*pool.map(run, [list(notebooks)]*2, libs)))

def cell(text):
    "A message or a line of code for a table, without where things lie on this machine"
    text = re.sub(r'\\[nrt]|█', ' ', text)   # in the repr of an error
    text = re.sub(r'(?<![\w:/.])/[\w./-]+', '…', text)
    return ' '.join(text.split()).replace('|', r'\|').replace('`', "'")

def reasons(outs):
    "What the cells said that failed; a name that a failed cell was to define is no reason of its own"
    found = [cell(why)[:90] for bad,_,why in outs.values() if bad]
    return list(dict.fromkeys([o for o in found if not o.startswith('NameError')] or found))

def report(clone, notebooks, results, changed, n_patches):
    "The result as Markdown"
    def git(*args): return subprocess.run(['git','-C',clone,*args], capture_output=True, text=True).stdout.split()
    theirs = re.search('"(.+)"', (Path(clone)/'fastai/__init__.py').read_text(encoding='utf-8'))[1]
    absent = [Path(o).stem for o in git('ls-files','nbs/*.ipynb') if not (Path(clone)/o).exists()]
    totals = [len(cells(o)[0]) for o in notebooks]
    n_pass = [sum(not bad for pair in results for bad,*_ in pair[k].values()) for k in (0,1)]
    whole = [sum(sum(not o[0] for o in pair[k].values())==n for pair,n in zip(results, totals)) for k in (0,1)]
    yield (f'## {datetime.date.today()}: the notebooks of fastai {theirs}, run with fastai {version("fastai")} '
        f'as it is, and with the {n_patches} patches\n')
    yield (f'python {platform.python_version()}, torch {version("torch")}, fastcore {version("fastcore")}, '
        f'{platform.machine()}; {len(notebooks)} notebooks with a module, {sum(totals)} cells\n')
    yield '| | as it is | with the patches |\n|---|---|---|'
    yield f'| cells that pass | {n_pass[0]} | {n_pass[1]} |'
    yield f'| notebooks of which every cell passes | {whole[0]} | {whole[1]} |\n'
    n = sum(map(len, changed.values()))
    plural,again = "s"*(n>1),", in each of two runs"*(n>0)
    yield f"{n or 'No'} cell{plural} passed with one of the two only{again}.\n"
    if n: yield '| notebook | cell | as it is | with the patches |\n|---|---|---|---|'
    for nb,(a,b) in zip(notebooks, results):
        for i in sorted(changed.get(nb, ())):
            a_said,b_said = ((cell(o[2])[:90] if o[0] else 'passes') if o else 'not run' for o in (a.get(i),b.get(i)))
            yield f'| {nb.stem} | `{cell((a.get(i) or b.get(i))[1])[:60]}` | {a_said} | {b_said} |'
    if n: yield ''
    yield 'Cells that failed with fastai as it is:\n\n| notebook | passed | of | what they said |\n|---|---|---|---|'
    for nb,(a,_),n in zip(notebooks, results, totals):
        ok = sum(not o[0] for o in a.values())
        said = reasons(a)
        if len(a)<n: said.append(f'not ended after {seconds} seconds, or died')
        if ok<n: yield f'| {nb.stem} | {ok} | {n} | {"; ".join(said[:3])}{"; …" if len(said)>3 else ""} |'
    if absent: yield f'\nNotebooks that the clone lacks: {", ".join(absent)}.'

def main(clone, save=True):
    notebooks = [o for o in sorted(Path(clone).resolve().glob('nbs/*.ipynb')) if cells(o)[1]]
    patches = sorted(root.glob('upstream/*.patch'))
    with tempfile.TemporaryDirectory() as tmp:
        libs = [Path(tmp)/o for o in ('stock','patched')]
        for o in libs: shutil.copytree(Path(find_spec('fastai').origin).parent, o/'fastai')
        env = os.environ | dict(GIT_CEILING_DIRECTORIES=tmp)
        for o in patches: subprocess.run(['git','apply',o], cwd=libs[1], env=env, check=True)
        results = both(notebooks, libs)
        changed = {nb:found for nb,pair in zip(notebooks, results) if (found:=differing(*pair))}
        if changed:
            for nb,pair in zip(changed, both(changed, libs)): changed[nb] &= differing(*pair)
    text = '\n'.join(report(clone, notebooks, results, changed, len(patches)))
    print(text)
    if save: saved.write_text(text+'\n', encoding='utf-8')

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('clone', nargs='?')
    parser.add_argument('--no-save', action='store_true')
    parser.add_argument('--run', nargs='+', help=argparse.SUPPRESS)
    args = parser.parse_args()
    run_all(args.run) if args.run else main(args.clone, not args.no_save)
