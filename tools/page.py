"""Run notebooks and save their outputs: `make page PAGE=images`, or `python tools/page.py images tables`.

Without a name, all notebooks are run. Each runs as with `nbdev-test`, in its own process. An output is saved only if it
differs from the saved one in more than times, addresses in memory and rounding. Paths of this machine and warnings of
other packages are removed. A notebook that fails does not change.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are so small that threads slow them down
os.environ.pop('MPLBACKEND', None)              # so that IPython saves plots in the notebook
import json, re, subprocess, sys
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def here(text):
    "Remove warnings of other packages, paths of this machine, and line numbers of warnings from the text"
    text = re.sub(r'^\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: .*\n(?:(?:\S.*\n)??  .*\n)?', '', text, flags=re.M)
    text = re.sub(r'^<ipython-input-\S+>:\d+: (\w*Warning: .*\n(?:(?!<)\S.*\n)*)(?:  .*\n)?', r'\1', text, flags=re.M)
    text = re.sub(r'^(\w*Warning: .*\n(?:More: .*\n)?)\1+', r'\1', text, flags=re.M)   # repeated by several fits
    text = re.sub(r'''[^\s'"(<=]*/(?:site|dist)-packages/''', '', text)
    for path,name in ((root,''), (Path.home(),'~/')):
        if path!=Path('/'): text = text.replace(f'{path}/', name)
    return text

def lines(text): return text.splitlines(True)

def shown(o):
    "Return a copy of the output `o` with its texts cleaned"
    o = dict(o)
    if 'text' in o: o['text'] = lines(here(''.join(o['text'])))
    if 'data' in o:
        o['data'] = {k: lines(here(''.join(v))) if k.startswith('text/') else v for k,v in o['data'].items()}
    return o

def joined(outputs):
    "Return the cleaned outputs; successive outputs of the same stream are joined to one"
    res = []
    for o in map(shown, outputs):
        if o.get('text')==[]: continue
        if res and o['output_type']=='stream' and res[-1].get('name')==o['name']:
            res[-1]['text'] = lines(''.join(res[-1]['text']+o['text']))
        else: res.append(o)
    return res

def pixels(png):
    "Return the pixels of a PNG in base64, as integers of shape (height, width, 4)"
    from PIL import Image
    import numpy as np
    return np.asarray(Image.open(BytesIO(b64decode(''.join(png)))).convert('RGBA')).astype(int)

def same_picture(a, b):
    "Whether two pictures differ in few pixels at most, and there only slightly"
    a,b = pixels(a),pixels(b)
    if a.shape!=b.shape: return False
    apart = abs(a-b).max(-1)
    return bool(apart.max()<=64 and (apart>0).mean()<1e-3)

passing = re.compile(r'\b\d+:\d\d(:\d\d)?\b|\(\d+\.\d s\)|(?<= at )0x[0-9a-f]+')   # times and addresses
number = re.compile(r'(\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)')   # whole numbers are counts, which must not differ

def same_number(a, b):
    """Whether two numbers differ by rounding only, which depends on the processor

    Numbers below 1e-6 are taken for errors of rounding, which may differ by a factor of 10.
    """
    a,b = float(a),float(b)
    small,large = sorted((a,b))
    return large-small<=1e-5*large or large<1e-13 or large<1e-6 and large<=10*small

def same_text(a, b):
    "Whether two texts differ in times, addresses in memory and rounding only"
    a,b = (number.split(passing.sub('', o)) for o in (a,b))
    return a[::2]==b[::2] and all(map(same_number, a[1::2], b[1::2]))

def same(a, b, kind=None):
    "Whether two outputs, or their parts of a `kind` such as 'image/png', agree"
    if kind=='image/png': return same_picture(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys()==b.keys() and all(same(a[k], b[k], k) for k in a if k!='metadata')
    if kind is None and isinstance(a, list) and isinstance(b, list): return len(a)==len(b) and all(map(same, a, b))
    return same_text(*(''.join(o) if isinstance(o, list) else str(o) for o in (a,b)))

def merged(old, new):
    "Replace the outputs of `old` that disagree with those of `new`; return `old` and the ids of the changed cells"
    outputs = {c['id']: joined(c['outputs']) for c in new['cells'] if c['cell_type']=='code'}
    changed = [c for c in old['cells'] if c['id'] in outputs and not same(c['outputs'], outputs[c['id']])]
    for c in changed: c['outputs'] = outputs[c['id']]
    return old,[c['id'] for c in changed]

def run(fn):
    "Run the notebook `fn` in this process, and save the outputs that differ; return True if it failed"
    from nbdev.clean import nbdev_clean
    from nbdev.config import get_config
    from nbdev.test import test_nb
    text = fn.read_text(encoding='utf-8')
    try:
        if not test_nb(fn, skip_flags=get_config(root).tst_flags.split(), basepath=root, save=True)[0]: return True
        nbdev_clean(str(fn))
        nb,changed = merged(json.loads(text), json.loads(fn.read_text(encoding='utf-8')))
    finally: fn.write_text(text, encoding='utf-8')
    if changed: fn.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')
    print(f'{fn.relative_to(root)}  ' + (f'saved: {", ".join(changed)}' if changed else 'as it was'))

def start(fn):
    "Run the notebook `fn` in a new process, and print the result; return a true value if it failed"
    res = subprocess.run([sys.executable, __file__, '--run', fn], cwd=root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(res.stdout.rstrip() if not res.returncode
        else f'{fn.relative_to(root)}  FAILED, and is left as it was\n{res.stdout}', flush=True)
    return res.returncode

def pages(*names):
    "Return the notebooks with these names, which are paths or parts of file names; without a name, all notebooks"
    from nbdev.doclinks import nbglob
    fns = sorted(nbglob(root/'nbs', as_path=True))
    if not names: return fns
    found = {nm: [fn for fn in fns if fn in (Path(nm).resolve(),root/nm)] or [fn for fn in fns if nm in fn.stem]
        for nm in names}
    for nm,o in found.items():
        if not o: sys.exit(f'no page has {nm!r} in its name: they are {", ".join(fn.stem for fn in fns)}')
    return sorted({fn for o in found.values() for fn in o})

def main(*names):
    os.chdir(root)   # nbdev reads its settings from this folder
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool: return any(list(pool.map(start, pages(*names))))

if __name__=='__main__': sys.exit(run(Path(sys.argv[2])) if sys.argv[1:2]==['--run'] else main(*sys.argv[1:]))
