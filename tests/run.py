"""Run the notebooks and the tests, and count them: what `make test` does.

`python tests/run.py sizes canaries` runs only the notebooks and the test files with one of these words in their names;
`python tests/run.py fit_in_memory --times 50` runs them that many times, to find what fails now and then.
"""
import argparse, multiprocessing, os, subprocess, sys, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

root = Path(__file__).resolve().parent.parent
slow = ('test_site','test_faults','test_bs_find','test_schedule','test_recovery','test_sweep')
os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are tiny: threads only cost
os.environ.setdefault('MPLBACKEND', 'agg')

def run(*args, **kwargs):
    return subprocess.run([sys.executable, *map(str, args)], cwd=root, stdin=subprocess.DEVNULL, **kwargs)

# Each notebook runs in a process of its own, so that one which dies takes no other with it. They are forks of one
# that has imported fastai, which takes longer than most pages do.
forks = multiprocessing.get_context('forkserver')

def pasted(Shell):
    """A `Shell` in which the cells that the site shows do without the names of those that it hides, so that a page
    runs when it is pasted. Hidden cells see all names; what they name is put away after them"""
    sys.path.insert(0, str(root/'docs'))
    from build import hides
    class Pasted(Shell):
        def cell(self, cell, **kwargs):
            if cell.cell_type!='code' or not hides(cell.directives_, cell.source): return super().cell(cell, **kwargs)
            seen = dict(self.user_ns)
            self.user_ns.update(self.__dict__.setdefault('away', {}))
            super().cell(cell, **kwargs)
            for nm,o in list(self.user_ns.items()):
                if nm.startswith('_') or nm in seen and seen[nm] is o: continue
                self.away[nm] = o
                if nm in seen: self.user_ns[nm] = seen[nm]
                else: del self.user_ns[nm]
    return Pasted

def test_notebook(fn):
    """In that process: run the notebook `fn` as `nbdev-test` does, but so that what the site hides is not needed;
    return whether it passed"""
    from nbdev import test
    from nbdev.config import get_config
    cfg = get_config(root)
    test.CaptureShell = pasted(test.CaptureShell)
    return test.test_nb(fn, skip_flags=cfg.tst_flags.split(), basepath=root)[0]

def in_its_process(fn, out):
    "Run the notebook `fn`; what it writes goes to the file `out`, also what its own processes write"
    with open(out, 'wb') as file:
        for o in (1,2): os.dup2(file.fileno(), o)
    sys.exit(not test_notebook(fn))

def run_notebook(fn):
    "Whether the notebook `fn` passed, in how many seconds, and what it wrote"
    start = time.time()
    with TemporaryDirectory() as tmp:
        out = Path(tmp)/'out'
        p = forks.Process(target=in_its_process, args=(fn,out))
        p.start()
        p.join()
        text = out.read_text(encoding='utf-8', errors='replace') if out.exists() else ''
    return p.exitcode==0, time.time()-start, text

def run_notebooks(fns):
    "The outcome of each notebook: its name, and how it ended"
    res = []
    if fns: forks.set_forkserver_preload(['fastai.vision.all','nbdev.showdoc','nbdev.test','IPython'])
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        jobs = {pool.submit(run_notebook, fn): fn for fn in fns}
        for job in as_completed(jobs):
            ok,secs,text = job.result()
            nm = str(jobs[job].relative_to(root))
            res.append((nm, 'passed') if ok else (named(nm, text.strip().rpartition('\n')[2]), 'failed'))
            print(f'{nm}  {"ok" if ok else "FAILED"}  {secs:.1f}s', flush=True)
            if not ok: print(text, flush=True)
    return res

def outcomes(xml):
    "The outcome of each test in pytest's report: its name, if it failed with what it said, and the worst of its ends"
    res,said = {},{}
    for o in ElementTree.parse(xml).iter('testcase'):
        tags = {c.tag:c for c in o}
        nm = f'{o.get("classname")}::{o.get("name")}'
        bad = next((tags[t] for t in ('failure','error') if t in tags), None)
        if bad is not None: said.setdefault(nm, named(nm, bad.get('message', '').partition('\n')[0]))
        res[nm] = 'failed' if nm in said else 'skipped' if 'skipped' in tags else 'passed'
    return [(said.get(nm, nm), o) for nm,o in res.items()]

def named(nm, said):
    "What failed, and why, in a line"
    return f'{nm} - {said[:200]}'

def failures(outs):
    "The names of those that failed"
    return [nm for nm,o in outs if o=='failed']

def run_pytest(path):
    """The outcomes of the tests in the file `path`, in how many seconds, and what pytest wrote; one more has failed
    if it ended badly without saying where"""
    start = time.time()
    with TemporaryDirectory() as tmp:
        xml = Path(tmp)/'report.xml'
        res = run('-m', 'pytest', '-q', '-ra', f'--junitxml={xml}', path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors='replace')
        outs = outcomes(xml) if xml.exists() else []
    if res.returncode not in (0,5) and not failures(outs): outs.append((str(path), 'failed'))   # 5: there were no tests
    return outs, time.time()-start, res.stdout

def run_tests(paths):
    """The outcomes of the tests in all `paths`, each in a process of its own; the longest file first, that none is
    left alone at the end"""
    res = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        jobs = {pool.submit(run_pytest, o): o for o in sorted(paths, key=lambda o: o.stem not in slow)}
        for job in as_completed(jobs):
            outs,secs,text = job.result()
            res += outs
            bad = failures(outs)
            print(f'{jobs[job].relative_to(root)}  {"FAILED" if bad else "ok"}  {len(outs)} tests  {secs:.1f}s',
                flush=True)
            if bad or any(o=='skipped' for _,o in outs): print(text, flush=True)
    return res

def main(*names, times=1):
    from nbdev.doclinks import nbglob
    def wanted(fns): return times*sorted(o for o in fns if not names or any(nm in o.stem for nm in names))
    os.chdir(root)   # nbdev looks for its settings from here
    fns,tests = wanted(nbglob(root/'nbs', as_path=True)),wanted((root/'tests').rglob('test_*.py'))
    pages,res = run_notebooks(fns),run_tests(tests)
    missing = [] if names and pages+res else [nm for nm,o in (('notebooks',pages), ('tests',res)) if not o]
    outs = pages+res+[(f'no {nm} were run', 'failed') for nm in missing]
    for nm in failures(outs): print(f'FAILED {nm}')   # at the end, where all that is kept of a long log may be its end
    counts = Counter(o for _,o in outs)
    print(f'{counts["passed"]} passed, {counts["failed"]} failed' +
        (f', {counts["skipped"]} skipped' if counts['skipped'] else ''))
    return counts['failed']>0

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='words in the names of notebooks and test files')
    parser.add_argument('--times', type=int, default=1, help='how often to run each')
    args = parser.parse_args()
    if args.times<1: parser.error(f'--times {args.times}: give at least 1')
    sys.exit(main(*args.names, times=args.times))
