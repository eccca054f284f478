"""Run pages and save their outputs: `make page PAGE=images`, or `python tools/page.py images tables`; without a name,
all of them.

A page is run as `nbdev-test` runs it, in a process of its own. An output is saved, cleaned, where it says something
else than the one that is there: not for times, addresses in memory, or rounding. Paths of this machine and other
packages' warnings are not saved. A page that fails is left as it is.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')   # the models are tiny: threads only cost
os.environ.pop('MPLBACKEND', None)              # IPython draws into the page
import json, re, subprocess, sys
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def here(text):
    "The text without other packages' warnings, where things lie on this machine, and which line of a cell warned"
    text = re.sub(r'^\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: .*\n(?:(?:\S.*\n)??  .*\n)?', '', text, flags=re.M)
    text = re.sub(r'^<ipython-input-\S+>:\d+: (\w*Warning: .*\n(?:(?!<)\S.*\n)*)(?:  .*\n)?', r'\1', text, flags=re.M)
    text = re.sub(r'^(\w*Warning: .*\n(?:More: .*\n)?)\1+', r'\1', text, flags=re.M)   # of several fits
    text = re.sub(r'''[^\s'"(<=]*/(?:site|dist)-packages/''', '', text)
    for path,name in ((root,''), (Path.home(),'~/')):
        if path!=Path('/'): text = text.replace(f'{path}/', name)
    return text

def lines(text): return text.splitlines(True)

def shown(o):
    "The output `o` as it is saved"
    o = dict(o)
    if 'text' in o: o['text'] = lines(here(''.join(o['text'])))
    if 'data' in o:
        o['data'] = {k: lines(here(''.join(v))) if k.startswith('text/') else v for k,v in o['data'].items()}
    return o

def joined(outputs):
    "Outputs as they are saved: what was written to a stream in several parts is one"
    res = []
    for o in map(shown, outputs):
        if o.get('text')==[]: continue
        if res and o['output_type']=='stream' and res[-1].get('name')==o['name']:
            res[-1]['text'] = lines(''.join(res[-1]['text']+o['text']))
        else: res.append(o)
    return res

def pixels(png):
    from PIL import Image
    import numpy as np
    return np.asarray(Image.open(BytesIO(b64decode(''.join(png)))).convert('RGBA')).astype(int)

def same_picture(a, b):
    "Are they the same but for some pixels that are a shade darker or lighter?"
    a,b = pixels(a),pixels(b)
    if a.shape!=b.shape: return False
    apart = abs(a-b).max(-1)
    return bool(apart.max()<=64 and (apart>0).mean()<1e-3)

passing = re.compile(r'\b\d+:\d\d(:\d\d)?\b|\(\d+\.\d s\)|(?<= at )0x[0-9a-f]+')   # times, and addresses in memory
number = re.compile(r'(\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)')   # whole numbers are counts: they are text

def same_number(a, b):
    """Are they the same but for rounding, which is another on another processor? Errors of rounding are of about
    the same size"""
    a,b = float(a),float(b)
    small,large = sorted((a,b))
    return large-small<=1e-5*large or large<1e-13 or large<1e-6 and large<=10*small

def same_text(a, b):
    "Are they the same but for times, addresses in memory, and rounding?"
    a,b = (number.split(passing.sub('', o)) for o in (a,b))
    return a[::2]==b[::2] and all(map(same_number, a[1::2], b[1::2]))

def same(a, b, kind=None):
    "Do two outputs, or parts of them of one kind, say the same?"
    if kind=='image/png': return same_picture(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys()==b.keys() and all(same(a[k], b[k], k) for k in a if k!='metadata')
    if kind is None and isinstance(a, list) and isinstance(b, list): return len(a)==len(b) and all(map(same, a, b))
    return same_text(*(''.join(o) if isinstance(o, list) else str(o) for o in (a,b)))

def merged(old, new):
    "The notebook `old` with the outputs of `new` that say something else, and the ids of the cells where they do"
    outputs = {c['id']: joined(c['outputs']) for c in new['cells'] if c['cell_type']=='code'}
    changed = [c for c in old['cells'] if c['id'] in outputs and not same(c['outputs'], outputs[c['id']])]
    for c in changed: c['outputs'] = outputs[c['id']]
    return old,[c['id'] for c in changed]

def run(fn):
    "In a process of its own: run the page `fn`, and save it where it says something else; returns whether it failed"
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
    "Whether the page `fn` failed"
    res = subprocess.run([sys.executable, __file__, '--run', fn], cwd=root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(res.stdout.rstrip() if not res.returncode
        else f'{fn.relative_to(root)}  FAILED, and is left as it was\n{res.stdout}', flush=True)
    return res.returncode

def pages(*names):
    "The pages of these names, given as a path or as what is in their file's name; all of them without a name"
    from nbdev.doclinks import nbglob
    fns = sorted(nbglob(root/'nbs', as_path=True))
    if not names: return fns
    found = {nm: [fn for fn in fns if fn in (Path(nm).resolve(),root/nm)] or [fn for fn in fns if nm in fn.stem]
        for nm in names}
    for nm,o in found.items():
        if not o: sys.exit(f'no page has {nm!r} in its name: they are {", ".join(fn.stem for fn in fns)}')
    return sorted({fn for o in found.values() for fn in o})

def main(*names):
    os.chdir(root)   # nbdev looks for its settings from here
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool: return any(list(pool.map(start, pages(*names))))

if __name__=='__main__': sys.exit(run(Path(sys.argv[2])) if sys.argv[1:2]==['--run'] else main(*sys.argv[1:]))
