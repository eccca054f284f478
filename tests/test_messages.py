"Each message has an entry on the page Troubleshooting, with a cause and a line to type, and ends with a link to it."
import ast, inspect, json, re, sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tools'))
import messages as tool

# Messages that need no entry, by module and beginning, and why
looks = 'stands as a reason in the table of `twin_check`, and is raised to nobody'
internal = {
    'check/look: the model returns no tensor': looks, 'check/look: the predictions of the parts': looks,
    'check/order: a … with a batch sampler': looks, 'check/order: a … does not tell': looks,
    'core/probe: the loss function draws': looks, 'core/probe: the sizes of the parts': looks,
    'core/probe: the loss is not finite': looks, 'core/kept: there are more than … objects': looks,
    'core/kept: there are more than … bytes': looks, 'core/kept: a … cannot be put back': looks,
    'memory/trials: there are only … samples': 'ends the search of `bs_find`, which shows what it has found',
    'noise/estimator: … micro-batches': 'for who calls `estimate`: the meter says first that there is one micro-batch',
    'processes/shares: a size of': 'nobody asks for it: with several processes `resizes` is `False`',
    'loggers: ': 'a method that a subclass has to write',
    'testing: do not know how to compare': 'for who writes tests, and names what was given'}

found = tool.messages()
keyed = {o.key for o in found if o.key}

def is_internal(o, nm):
    where,_,start = nm.partition(': ')
    return o.where.rpartition(':')[0]==where and o.text.startswith(start)

def test_no_message_without_a_key():
    silent = [o for o in found if not o.key and not any(is_internal(o, nm) for nm in internal)]
    assert not silent, "append `+ see('key')`, and write an entry on nbs/troubleshooting.ipynb"

@pytest.mark.parametrize('nm', internal)
def test_what_has_none_is_there(nm):
    assert [o for o in found if not o.key and is_internal(o, nm)], 'take it off this list'

def test_keys_are_words():
    assert len(keyed)>60 and all(re.fullmatch('[a-z]+(-[a-z]+)*', o) for o in keyed)

source = '''
class Ours(ValueError):
    def __init__(self, o): super().__init__(f"{o} is ours" + see('own'))
def f(n, e):
    why = 'no number' if n else 'none'
    if n: raise TypeError(f"`n={n}` is {why}" + see('number'))
    if e: raise e
    if n>1: raise Ours(n)
    if n>2: raise CancelFitException
    if n>3: raise RuntimeError('silent')
    once(n, 'rain', "it " f"rains on {n}", LossWarning)
    warn("no " + "key")
'''
def test_reading(tmp_path, monkeypatch):
    (tmp_path/'a.py').write_text(source)
    monkeypatch.setattr(tool, 'lib', tmp_path)
    assert [o[1:] for o in tool.messages()]==[('Ours','own','… is ours'), ('TypeError','number','`n=…` is none'),
        ('RuntimeError',None,'silent'), ('LossWarning','rain','it rains on …'), ('UserWarning',None,'no key')]

# The page

def cells(nm):
    nb = json.loads((root/f'nbs/{nm}.ipynb').read_text(encoding='utf-8'))
    return [''.join(c['source']) for c in nb['cells'] if c['cell_type']=='markdown']

page = cells('troubleshooting')
at = next(i for i,o in enumerate(page) if o.startswith('## FAQ'))
written = {tool.slug(o.split('\n')[0][4:]):o for o in page[:at] if o.startswith('### ')}

def test_each_key_has_an_entry_and_each_entry_a_key():
    assert keyed-written.keys()==set() and written.keys()-keyed==set()
    headings = [h for o in page for h in tool.entries(o)]
    assert len(headings)==len(set(headings))

def test_page_has_the_messages_of_the_code():
    assert tool.main(check=True)==0

@pytest.mark.parametrize('key', written)
def test_entry_says_why_and_what_to_type(key):
    prose,_,code = written[key].partition('```python\n')
    said = [o for o in prose.split('\n')[1:] if o and not o.startswith('>')]
    assert len(' '.join(said))>40 and code.strip()

def test_anchors():
    "What Sphinx makes of a heading is the key"
    make_id = pytest.importorskip('docutils.nodes').make_id
    for o in written.values(): assert make_id(o.split('\n')[0][4:])==tool.slug(o.split('\n')[0][4:])

def test_anchors_of_the_built_site():
    built = root/'_docs/.fingerprint'
    if not built.exists(): pytest.skip('the site has not been built')
    sys.path.insert(0, str(root/'docs'))
    from build import fingerprint
    if built.read_text()!=fingerprint(): pytest.skip('the site is older than what it is made of')
    html = (root/'_docs/troubleshooting.html').read_text(encoding='utf-8')
    assert not [o for o in keyed if f'id="{o}"' not in html]

# What pages show

def outputs():
    "The text of each saved output, by page and cell"
    for fn in sorted((root/'nbs').rglob('*.ipynb')):
        for c in json.loads(fn.read_text(encoding='utf-8'))['cells']:
            for o in c.get('outputs', []):
                for v in [o.get('text', []), *(v for k,v in o.get('data', {}).items() if k.startswith('text/'))]:
                    if v: yield f'{fn.relative_to(root)}, {c["id"]}',''.join(v)

def solid(o): return o.text.replace(tool.blank, '')
def shape(o): return '[^\n]{0,400}?'.join(map(re.escape, o.text.split(tool.blank)))+r'[^\n]*(?:\n.*)?'
shapes = {o.key:re.compile('|'.join(shape(m) for m in found if m.key==o.key and len(solid(m))>30))
    for o in found if o.key and len(solid(o))>30}
categories = '|'.join({o.kind for o in found if o.kind.endswith('Warning')})

def outdated(text):
    "What it shows of messages without the line that all have"
    lines = text.split('\n')
    res = [a for a,b in zip(lines, [*lines[1:],''])
        if re.search(fr'(^|fastaccum/.*: )({categories}): ', a) and not b.startswith('More: ')]
    return res + [m[0] for key,o in shapes.items() for m in o.finditer(text) if not m[0].endswith(f'#{key}')]

def test_saved_outputs_show_messages_as_they_are():
    "After a change of a message, run the pages that show it: `make page PAGE=…`"
    old = [(where,o) for where,text in outputs() for o in outdated(text)]
    assert not old

def test_outdated_messages_are_seen():
    from fastaccum.core.notices import see
    said = 'x/fastaccum/core/notices.py:3: BatchNormWarning: 1 BatchNorm layer normalises'
    empty = ('the training loader has no batch, so nothing is trained: has its dataset samples, and are they '
        'enough for one batch if it drops the last?')
    for o,key in ((said,'batchnorm'), (empty,'no-batch')):
        assert outdated(o) and outdated(f'{o}\n') and not outdated(f'a\n{o}{see(key)}\n  warn(msg)')
    assert outdated(empty+see('batchnorm'))

def test_link():
    from fastaccum.core.notices import see
    from readme import docs_url
    assert see('no-step')==f'\nMore: {docs_url()}/troubleshooting.html#no-step'

twin = re.compile(r'(?:Loss|BatchNorm|Loader|State)Warning: .*\n(.*)')

pages = sorted((root/'nbs').rglob('*.ipynb'))

@pytest.mark.parametrize('fn', pages, ids=lambda o: o.relative_to(root/'nbs').as_posix())
def test_warnings_that_a_page_shows_are_those_of_now(fn):
    "What was saved before the messages ended with their link has another one"
    cs = json.loads(fn.read_text(encoding='utf-8'))['cells']
    shown = [''.join(o.get('text', ())) for c in cs for o in c.get('outputs', ())]
    assert not [after for o in shown for after in twin.findall(o) if not after.startswith('More: ')]

# What it says to type

import fastai.vision.all, fastai.text.all, fastai.callback.wandb
import fastaccum.all, fastaccum.wandb
from fastai.learner import Learner
known = {k:v for o in (fastai.text.all,fastai.vision.all,fastaccum.wandb,fastaccum.all) for k,v in vars(o).items()}

def snippets(nm): return [o for c in cells(nm) for o in re.findall(r'^```python\n(.*?)^```', c, re.M|re.S)]

def parsed(code):
    "Its nodes, also of a line of a method or a function"
    return ast.walk(ast.parse(code if not re.match('(raise|self)', code) else f'def f(self):\n    {code}'))

@pytest.mark.parametrize('code', snippets('troubleshooting'))
def test_what_is_typed_exists(code):
    "Methods of the Learner and classes, with arguments that they take"
    for o in parsed(code):
        if isinstance(o, ast.ImportFrom) and o.module.startswith('fastaccum'):
            mod = __import__(o.module, fromlist=['_'])
            assert all(a.name=='*' or hasattr(mod, a.name) for a in o.names)
        if not isinstance(o, ast.Call): continue
        f = ast.unparse(o.func)
        if f=='learn.distrib_ctx': continue   # fastai's needs accelerate
        if re.fullmatch(r'(self\.)?learn\.\w+', f): obj = getattr(Learner, f.rpartition('.')[2])
        elif f in known and inspect.isclass(known[f]): obj = known[f]
        else: continue
        params = inspect.signature(obj).parameters
        if any(p.kind==p.VAR_KEYWORD for p in params.values()): continue
        assert all(k.arg in params for k in o.keywords), f
        n = sum(p.kind in (p.POSITIONAL_ONLY,p.POSITIONAL_OR_KEYWORD) for p in params.values())
        assert len(o.args)<=n or any(p.kind==p.VAR_POSITIONAL for p in params.values()), f
