"""Write the beginnings of the package's messages into their entries in nbs/reference/messages.ipynb.

A message ends with `more_link('key')`, or is passed to `warn_once('key', …)`. The heading of its entry is the key in
words, or the entry has `<span id="key"></span>` below its heading or at the beginning of a row of a table. The rest of
an entry is written by hand.
"""
import ast, json, re
from collections import namedtuple
from pathlib import Path

lib = Path(__file__).resolve().parent.parent/'fastaccum'
page = lib.parent/'nbs/reference/messages.ipynb'
blank,span = '…',r'<span id="([a-z-]+)"></span>'   # `blank` replaces values that the code computes
Message = namedtuple('Message', 'kind key text')   # kind: the class of the error or warning, or 'Added to an error'

# Messages of which little would be left without the values: the quotation, and a real message to show instead
examples = {
    '`…` must be …a whole number of …s, got … (…)': '`accum_bs` must be a whole number of samples, got 64.0 (float)',
    '`…` must be True or False, got … (…)': '`verbose` must be True or False, got 16 (int)',
    '`…` must be … or …, got …': "`mode` must be 'power' or 'binsearch', got 'binary'",
    '`…(…)` does not say what … means …': '`GradientCache(16)` does not say what 16 means …',
    '`…=…` is negative or not finite …': '`start=-0.5` is negative or not finite …',
    '`schedule=…` cannot be called with … and … (…) …': '`schedule=…` cannot be called with 64 and 512 …',
    '… in `scheduling=…` is of type …': '0.5 in `scheduling={0.5: 2}` is of type float …',
    '… … callbacks are on this Learner, and each …': '2 NoiseScale callbacks are on this Learner …',
    '… callbacks accumulate gradients, …: keep one of them': '2 callbacks accumulate gradients, …: keep one of them',
    '… cannot tell how long the rows of …': 'TokenBudget(8192) cannot tell how long the rows of a batch are …',
    '… needs integer token ids or an `attention_mask` …': 'TokenBudget(8192) needs integer token ids …',
    'a … in a batch of … samples cannot …': 'a Graph in a batch of 64 samples cannot be split …',
    'only … of … steps were taken …': 'only 3 of 20 steps were taken …',
    'the training …, so with batches of … it …': 'the training LMDataLoader cuts the text into as many streams as …',
    '… of … samples are left out of each …': '58 of 250 samples are left out of …',
    'epoch … has … samples, too few for a …': 'epoch 0 has 48 samples, too few for …',
    '… BatchNorm layers normalize over the … samples of …': '20 BatchNorm layers normalize over the 16 samples …',
    '`micro_batch_size=…` is larger than the … samples in …': '`micro_batch_size=64` is larger than the 16 samples …',
    '`accum_bs=…` is more than the … samples that …': '`accum_bs=5000` is more than the 1400 samples …',
    '… keeps its state from one micro-batch to …': 'LSTM keeps its state from one micro-batch …',
    '… has an optimizer of its own, which …': 'CycleGANTrainer has an optimizer of its own …',
    "… mixes the … samples of a loader's batch …": "MixUp mixes the 16 samples of a loader's …",
    '… was switched off or removed during an …': 'GradientAccumulation was switched off or removed …',
    '`start=…` is later than `finish=…` …': '`start=5` is later than `finish=2` …',
    'the key … in `scheduling=…` is negative …': 'the key -1 in `scheduling={-1: 2}` is negative …',
    'the value … in `scheduling=…` is below 1 …': 'the value 0 in `scheduling={0: 0}` is below …',
    '`schedule(…, …)` returned …, which is not a function …':
        '`schedule(64, 512)` returned 3, which is not a function …',
    '`schedule` raised … (…) at progress …, where 0 is …': '`schedule` raised ZeroDivisionError (…) at progress 0 …',
    '`schedule` returned … at progress …, where 0 is …': '`schedule` returned -8.0 at progress 1 …',
    '… differs between the processes (…) …': '`accum_bs` differs between the processes (64, 32) …',
    '…, so `RecalibrateBN` has nothing to do: leave the callback out':
        '… has no BatchNorm layer …, so `RecalibrateBN` has nothing to do',
    '…, so `recalibrate_bn` has nothing to do: leave out the call':
        '… has no BatchNorm layer …, so `recalibrate_bn` has nothing to do',
    'of the … BatchNorm layers that `FreezeBN` freezes …':
        'of the 20 BatchNorm layers that `FreezeBN` freezes, 2 saw …',
    'with batches of … samples, a trial took only … of … steps. …':
        'with batches of 64 samples, a trial took only 1 of 3 steps …',
    'the loss as changed by … is not …': 'the loss as changed by Penalty is not a mean …',
    'memory ran out in …, which does not …': "memory ran out in the optimizer's step, which does not …",
    '`…` has no argument `…`. …': '`GradientAccumulation` has no argument `accumulate` …',
    '`…` does not work in … processes, because …': '`accum_check` does not work in 2 processes, because …',
    '`split(batch, …, …, …)` returned targets of shape …, whose first …':
        '`split(batch, 0, 16, 64)` returned targets of shape …',
    '`…` must be at least 1, got …': '`accum_bs` must be at least 1, got 0',
    '`…` must be a function that takes …': '`n_items` must be a function that takes …',
    '`…` must be a fraction of training …': '`start` must be a fraction of training …',
    'a step has … samples instead of `…=…` …': 'a step has 66 samples instead of `accum_bs=65` …',
    'a … in `segments` is not inside this …': 'a Linear in `segments` is not inside this …',
    'this Learner has its own `…`, and …': 'this Learner has its own `one_batch`, and …',
    '… is compiled, and the compiler decides which …': 'Sequential is compiled, and the compiler decides which …',
    '… normalizes with the samples of a micro-batch …': 'BatchNorm2d normalizes with the samples of …',
    'the model returned a … for a micro-batch …': 'the model returned a float for a micro-batch …',
    'segment … lies inside segment …: pass only one of the two': "segment '0.1' lies inside segment '0' …",
    'the processes have different loaders (…), but with …':
        'the processes have different loaders (2 micro-batches of 16 …',
    "the loader's batches of … samples are larger …": "the loader's batches of 16 samples are larger …",
}

def slug(heading):
    "Return the key of an entry from its heading"
    return re.sub(r'[^a-z0-9]+', '-', heading.lower()).strip('-')
def called(o):
    "Return the name of the function that the expression `o` calls, or an empty string"
    return getattr(o.func, 'attr', getattr(o.func, 'id', '')) if isinstance(o, ast.Call) else ''

def words(o, values):
    "Return the text of the expression `o`; `values` has the expressions that are assigned to local names"
    if isinstance(o, ast.Constant) and isinstance(o.value, str): return o.value
    if isinstance(o, ast.JoinedStr): return ''.join(words(part, values) for part in o.values)
    if isinstance(o, ast.FormattedValue): return words(o.value, values)
    if isinstance(o, ast.Name) and values.get(o.id): return words(values[o.id], {**values, o.id:None})
    if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Add): return words(o.left, values)+words(o.right, values)
    if isinstance(o, ast.IfExp): return words(o.orelse, values)
    return '' if called(o)=='more_link' else blank

def key_of(o):
    "Return the key of the `more_link` at the end of the expression `o`, or None"
    if isinstance(o, ast.BinOp): return key_of(o.right)
    return getattr(o.args[0], 'value', None) if called(o)=='more_link' else None

def read(node, values, cls=''):
    "Yield the messages within a node of the syntax tree; `cls` is the class that contains the node"
    for o in ast.iter_child_nodes(node):
        name,args = called(o),getattr(o, 'args', [])
        for i,text in enumerate(args if name else []):
            key = args[0].value if name=='warn_once' and i==1 else key_of(text)
            if not key: continue
            category = ast.unparse(args[i+1]) if args[i+1:] else 'UserWarning'
            kinds = {'warn':category, 'warn_once':category, 'append_message':'Added to an error', '__init__':cls}
            kind = kinds.get(name, name)
            yield Message(kind, key, re.sub(f'{blank}+', blank, words(text, values)))
        assigns = [a for a in ast.walk(o) if isinstance(o, ast.FunctionDef) and isinstance(a, ast.Assign)]
        names = [ast.unparse(a.targets[0]) for a in assigns]
        local = {nm: a.value if names.count(nm)==1 else None for nm,a in zip(names, assigns)}
        yield from read(o, {**values, **local}, o.name if isinstance(o, ast.ClassDef) else cls)

def messages():
    "Return the messages of all modules of the package"
    return [o for fn in sorted(lib.rglob('[a-z]*.py')) for o in read(ast.parse(fn.read_text(encoding='utf-8')), {})]

def anchors(text):
    "Return a dict from the keys with an entry in the text of a cell to the heading above the entry"
    titles = {slug(head): head for head in re.findall('^### (.+)', text, re.M)}
    return titles | {m[1]: re.findall('^##+ (.+)', text[:m.start()], re.M)[-1] for m in re.finditer(span, text)}

def short(text, n=7, more=3):
    "Return the first `n` words of a message, or all words if at most `more` follow; code counts as one word"
    found = [o for o in re.finditer(r'(?:`[^`]*`|[^\s`])+', text) if o[0].strip('(),.:;')!=blank]
    if len(found)<=n+more: return text
    text = re.sub(r'[.:;] (\S+ ?){1,3}$', '', text[:found[n-1].end()].rstrip(f',;:. {blank}'))   # drop a cut sentence
    text = text.rstrip(f' {blank}')
    return f'{text.rpartition("(")[0].rstrip(",;: ") if text.count("(")>text.count(")") else text} {blank}'

def quoted(found, *keys):
    "Return the Markdown of the messages in `found` that have one of the keys"
    def escaped(text): return re.sub(r'(`[^`]*`)|([*<|])', lambda m: m[1] or f'\\{m[2]}', text)
    texts = sorted({(o.kind, examples.get(short(o.text)) or short(o.text, 6, 0)) for o in found if o.key in keys})
    return [f'**{kind}:** {escaped(text)}' for kind,text in texts]

def filled(text, found):
    "Return the text of a cell with the messages in `found` inserted into its entries"
    def entry(m):
        lines = quoted(found, slug(m[1]), *re.findall(span, m[2]))
        return ''.join(f'{o}\n\n' for o in (f'### {m[1]}', m[2], '\n>\n'.join(f'> {o}' for o in lines)) if o)
    text = re.sub(fr'^### (.+)\n\n((?:{span})*)\n*(?:(?:>.*\n)+\n)?', entry, text, flags=re.M)
    return re.sub(fr'^(\| {span}).*?(?= \| )', lambda m: m[1]+'<br>'.join(quoted(found, m[2])), text, flags=re.M)

def main():
    nb,found = json.loads(page.read_text(encoding='utf-8')),messages()
    for c in nb['cells']:
        if c['cell_type']=='markdown': c['source'] = filled(''.join(c['source']), found).splitlines(True)
    page.write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')

if __name__=='__main__': main()
