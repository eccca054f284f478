"""Each message ends with a link to its entry on the page Messages, and each entry belongs to a message.

An entry shows how the message begins, explains the cause, and has a line of code that runs. The FAQ is
short, and its code runs.
"""
import ast, fresh, inspect, json, re, subprocess, sys, warnings
from importlib.util import find_spec
from pathlib import Path
import pytest
import fastai.callback.wandb, fastai.text.all, fastai.vision.all, fastaccum.all, fastaccum.wandb
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, nn, torch
from fastaccum import GradientAccumulation
from fastaccum.base.messages import catalogue, fields_of, template_of
from fastaccum.testing import toy
import messages as tool
from common import called, message_calls
from readme import docs_url

root = Path(__file__).resolve().parent.parent
found = tool.messages()
trees = [ast.parse(fn.read_text(encoding='utf-8')) for fn in tool.lib.rglob('[a-z]*.py')]
calls = [o for tree in trees for o in message_calls(tree)]

# The catalogue

# The beginnings of errors that fastaccum raises and catches itself, to show their text within another
# message
caught_inside = ('the predictions of', 'the loss draws random numbers', 'a callback or the loss function holds',
    'there are only', 'do not know how to compare')

def test_each_error_and_warning_is_in_the_catalogue():
    "If this fails, write the text into nbs/base/00_messages.ipynb, `raise refuse('key', …)`, and write its entry"
    classes = {o.name for tree in trees for o in ast.walk(tree) if isinstance(o, ast.ClassDef)}
    errors = [o for tree in trees for o in ast.walk(tree) if re.fullmatch('.*Error', called(o)) and o.args]
    texts = [ast.unparse(o.args[0]).lstrip('f').strip('\'"') for o in errors if called(o) not in classes]
    assert len(calls)>140 and not [o for o in texts if not o.startswith(caught_inside)]

def test_each_key_is_used_and_each_used_key_exists():
    phrases = {k for o in catalogue.values() for k in re.findall('{([a-z]+-[a-z-]+)}', o.text)}
    assert {k for _,keys,_ in calls for k in keys} | phrases == catalogue.keys()

def test_calls_of_our_classes_can_be_typed_as_readme_imports_them():
    "README writes `import fastaccum`, and then `fastaccum.GradientAccumulation(256)`"
    classes = '|'.join(o for o in fastaccum.__all__ if o[0].isupper())
    code = [(k,c) for k,o in catalogue.items() for c in re.findall('`[^`]+`', o.text)]
    assert [(k,c) for k,c in code if re.search(rf'(?<![.\w])({classes})\(', c)]==[]

def test_no_key_occurs_twice():
    text = ''.join(fn.read_text(encoding='utf-8') for fn in tool.lib.rglob('messages.py'))
    assert len(re.findall(r'^\[[a-z/-]+\] \w+: ', text, re.M))==len(catalogue)

def test_an_error_is_refused_a_warning_given_and_a_note_appended():
    kinds = dict(refuse='Error', warn='Warning', warn_once='Warning', append_message='Note', text_of='Phrase')
    assert not [ast.unparse(o) for o,keys,_ in calls
        if not keys or not all(catalogue[k].kind.endswith(kinds[called(o)]) for k in keys)]

def test_each_call_passes_the_fields_of_its_text():
    """A value that is passed in order is a variable or attribute with the name of its field, or `self`

    Texts between which a call chooses may have fewer fields, but no others.
    """
    for o,keys,args in calls:
        named = {k.arg for k in o.keywords}
        fields = {k: fields_of(template_of(k)) for k in keys}
        assert named<=set().union(*fields.values()), ast.unparse(o)
        in_order = {k: [f for f in fs if f not in named] for k,fs in fields.items()}
        assert max(map(len, in_order.values()))==len(args), ast.unparse(o)
        for names in in_order.values():
            passed = [getattr(a, 'attr', getattr(a, 'id', None)) for a in args]
            assert all(a in (f,'self') for a,f in zip(passed, names)), f'{ast.unparse(o)}: {names}'

def test_each_key_has_an_entry_and_each_entry_a_key():
    assert {o.key for o in found}==written.keys() and len(written)>60

def test_links_of_earlier_versions_lead_to_an_entry():
    assert old_keys<={k for o in page for k in tool.anchors(o)}

def test_a_message_ends_with_the_link_to_its_entry():
    with pytest.raises(ValueError) as e: GradientAccumulation(0)
    assert str(e.value).endswith(f'\nMore: {docs_url()}/reference/messages.html#whole-number')

def test_importing_fastaccum_wandb_without_wandb_says_what_to_install():
    code = "import sys; sys.modules['wandb'] = None; import fastaccum.wandb"   # None: as if not installed
    res = fresh.run(code, quiet=True)
    error = res.stderr.rpartition('ModuleNotFoundError: ')[2]
    assert res.returncode and error.startswith('`fastaccum.wandb` needs the package wandb')
    assert '`pip install wandb`' in error and '`pip install fastaccum[wandb]`' in error

# The page

def cells(fn): return json.loads(fn.read_text(encoding='utf-8'))['cells']

def texts(nm):
    "Return the texts of the Markdown cells of the page `nm`"
    return [''.join(c['source']) for c in cells(root/f'nbs/reference/{nm}.ipynb') if c['cell_type']=='markdown']
def prose(text):
    "Return the text of a cell without code blocks, classes of messages, keywords and anchors"
    return re.sub(fr'^```.*?^```|^>$|^> \*\*.*?\*\*|^- keywords:.*?$|{tool.span}', '', text, flags=re.M|re.S)

page,faq = texts('messages'),texts('faq')
headed = [o for o in page if o.startswith('### ')]
# An entry is a row of a table or a section with a heading; `written` has both by key
rows = {m[1]:m[0] for o in page for m in re.finditer(fr'^\| {tool.span}.*$', o, re.M)}
# The anchors of headings above a group of entries, and of headings that say more than the key of their entry
groups = {'processes-that-wait', 'batch-size', 'incomplete-steps', 'sizes-of-the-loader', 'token-budget',
    'trials-and-searches', 'other-callbacks-and-optimizers', 'gradientcache', 'activationcheckpoint',
    'several-processes', 'batches-larger-than-a-step', 'callback-adds-rows', 'callback-changes-the-loss',
    'cancelled-micro-batches', 'micro-batches-became-smaller', 'mixup-within-micro-batches', 'tensor-changed-in-place'}
# Keys of earlier versions that no message has any more; links to them must still lead to an entry
old_keys = {'added-to-a-sum', 'betas-of-adam', 'cancelled', 'changed-loss-not-tried', 'epoch-without-step',
    'gradient-comes-and-goes', 'keeps-the-whole-batch', 'model-part', 'more-rows', 'no-noise-scale',
    'not-a-callback', 'processes-apart', 'split-function', 'told-different-things'}
written = {k:o for o in headed for k in tool.anchors(o) if k not in groups|old_keys} | rows

def test_the_page_shows_how_the_messages_of_the_code_begin():
    "If this fails, run `make prepare`, which writes the beginnings of the messages into the page"
    assert [text for text in page if tool.filled(text, found)!=text]==[]

def test_values_are_for_the_fields_of_a_message():
    "If this fails, a message has changed: mend its values in tools/messages.py"
    n_fields = {o.name: o.text.count(tool.blank) for o in found}
    assert not [k for k,v in tool.values.items() if v.count('|')>=n_fields[k]]

@pytest.mark.parametrize('key', rows)
def test_a_row_says_what_to_do_and_what_to_type(key):
    message,_,rest = rows[key].strip('| ').partition(' | ')
    remedy,_,example = rest.rpartition('<br>')
    assert '**' in message and len(remedy)>25 and re.fullmatch('`[^`]+`', example)

@pytest.mark.parametrize('key', [k for k in written if k not in rows])
def test_an_entry_says_why_and_what_to_type(key):
    title,*lines = written[key].partition('```python\n')[0].split('\n')
    # other characters would change the anchor that Sphinx makes of the title
    assert re.fullmatch('### [A-Za-z -]+', title)
    assert len(' '.join(o for o in lines if not o.startswith(('>','<'))))>40 and '```python\n' in written[key]

@pytest.mark.skipif(find_spec('ruff') is None, reason='`make compat` does not install ruff')
def test_a_sorter_of_imports_keeps_the_order_that_the_entry_import_order_shows(tmp_path):
    file = tmp_path/'example.py'
    file.write_text(re.search('```python\n(.*?)```', written['import-order'], re.S)[1], encoding='utf-8')
    subprocess.run([sys.executable,'-m','ruff','check','--isolated','--select','I','--fix','--quiet',file], check=True)
    text = file.read_text(encoding='utf-8')
    assert text.index('from fastai.vision.all import *')<text.index('from fastaccum import')

def test_no_heading_occurs_twice():
    for o in (page, faq):
        headings = re.findall(r'^### (.+)$', '\n'.join(o), re.M)
        assert len(headings)==len(set(headings))

def test_pages_are_short():
    "The number of words outside of code is limited"
    assert len(prose('\n'.join(page)).split())<=3570 and len(prose('\n'.join(faq)).split())<=1000

@pytest.mark.parametrize('text', [o for o in faq if o.startswith('### ')], ids=lambda o: o.split('\n')[0][4:])
def test_an_answer_is_short_and_has_a_link(text):
    answer = prose(text.partition('\n')[2])
    assert 5<len(answer.split())<=60 and '](' in answer

# Messages in the saved outputs of pages: `begins` has, by the first 40 characters of a message, a
# regular expression for the whole message

def begin(o): return o.text.partition(tool.blank)[0][:40]
def pattern(o): return '[^\n]{0,400}?'.join(map(re.escape, o.text.split(tool.blank)))+fr'[^\n]*\nMore: \S+#{o.key}'
begins = {begin(o):'|'.join(pattern(m) for m in found if begin(m)==begin(o))
    for o in found if o.key and len(begin(o))>20}

def outdated(text):
    "Return the lines of `text` that begin like a message of the code but continue differently"
    return [m for k,v in begins.items() if k in text for m in re.findall(f'(?!{v}){re.escape(k)}.*', text)]

@pytest.mark.parametrize('fn', sorted((root/'nbs').rglob('*.ipynb')), ids=lambda o: f'{o.parent.name}/{o.stem}')
def test_saved_outputs_of_pages_show_the_current_messages(fn):
    "After changing a message, run the pages that show it: `make page PAGE=…`"
    outs = [o for c in cells(fn) for o in c.get('outputs', ())]
    data = [v for o in outs for k,v in {'text':o.get('text', ()), **o.get('data', {})}.items() if k[:4]=='text']
    assert not [o for v in data for o in outdated(''.join(v))]

def test_an_outdated_message_in_an_output_is_found():
    assert outdated('the training loader has no batches, so nothing is trained.\nMore: https://a#no-batch')

# The code in entries and answers

known = {k:v for o in (fastai.text.all,fastai.vision.all,fastaccum.wandb,fastaccum.all) for k,v in vars(o).items()}
code = [o for c in [*page,*faq] for o in re.findall(r'^```python\n(.*?)^```', c, re.M|re.S)]
code += [o.split('`')[-2] for o in rows.values()]

def callee(f):
    "Return the method of Learner or the class that the code `f` names, or None for other code"
    # fastai adds `distrib_ctx` to Learner in a module that needs the optional package accelerate
    if re.fullmatch(r'(self\.)?learn\.\w+', f) and f!='learn.distrib_ctx': return getattr(Learner, f.rpartition('.')[2])
    return known[f] if inspect.isclass(known.get(f)) else None

@pytest.mark.parametrize('text', code)
def test_the_functions_in_code_exist_and_take_these_arguments(text):
    for o in ast.walk(ast.parse(f'def f(self):\n    {text}' if re.match('(raise|self)', text) else text)):
        if isinstance(o, ast.ImportFrom) and o.module.startswith('fastaccum'):
            mod = __import__(o.module, fromlist=['_'])
            assert all(a.name=='*' or hasattr(mod, a.name) for a in o.names)
        f = callee(ast.unparse(o.func)) if isinstance(o, ast.Call) else None
        if f: inspect.signature(f).bind_partial(*([None]*len(o.args)), **{k.arg:None for k in o.keywords if k.arg})

answers = {o.split('\n')[0][4:]: re.search(r'^```python\n(.*?)^```', o, re.M|re.S)[1] for o in faq if o[:4]=='### '}
# other tests run the answers with these words, which need several processes or the package wandb
elsewhere = 'distrib_ctx', 'wandb'

@pytest.mark.parametrize('name', [k for k,v in answers.items() if not any(o in v for o in elsewhere)])
def test_the_code_of_an_answer_runs(name, tmp_path, monkeypatch):
    "The answer runs after the imports at the top of the page, with a Learner named `learn`"
    space = {}
    exec(re.search(r'^```python\n(.*?)^```', faq[1], re.M|re.S)[1], space)
    x = torch.randn(512, 5)
    data = list(zip(x, (x[:,0]>0).long()))
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    dls = DataLoaders(DataLoader(data, bs=256), DataLoader(data[:16], bs=16))
    learn = Learner(dls, model, CrossEntropyLossFlat(), path=tmp_path)
    # a real search would fill the memory of this machine
    monkeypatch.setattr(type(learn), 'bs_find', lambda self: 32)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1)
        exec(answers[name], space|dict(learn=learn))

def test_the_remedy_for_two_callbacks_removes_both_classes():
    "The Learner has fastai's callback and fastaccum's callback of the same name"
    learn = toy(4)
    learn.add_cbs([GradientAccumulation(8),FastaiGradientAccumulation(8)])
    with pytest.raises(ValueError): learn.fit(1)
    remedy = written['two-callbacks'].partition('```python\n')[2].partition('learn.fit')[0]
    exec(remedy, dict(learn=learn))
    assert not [o for o in learn.cbs if 'Accumulation' in type(o).__name__]
