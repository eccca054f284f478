"""Write the beginnings of the package's messages into their entries in nbs/reference/messages.ipynb.

The texts are those of the catalogue in nbs/base/00_messages.ipynb. The heading of an entry is the part of the key
before the slash, in words, or the entry has `<span id="key"></span>` below its heading or at the beginning of a row of
a table. The rest of an entry is written by hand.
"""
import json, re
from collections import namedtuple
from pathlib import Path
from fastaccum.base.messages import catalogue, template_of

lib = Path(__file__).resolve().parent.parent/'fastaccum'
page = lib.parent/'nbs/reference/messages.ipynb'
blank,span = '…',r'<span id="([a-z-]+)"></span>'   # `blank` replaces the fields of a message
# name: the key in the catalogue; key: the part before the slash; kind: a class, or 'Added to an error'
Message = namedtuple('Message', 'name key kind text')

# Values for the first fields of messages that say little without them, separated by `|`
values = {
    'out-of-memory/optimizer': "the optimizer's step",
    'out-of-memory/callback': "a callback's `before_step`", 'out-of-memory': 'a single sample',
    'no-step': '0|48', 'no-step/smaller': '0|48', 'no-step/dropped-by-the-loader': '0|48',
    'samples-left-out': '58|250', 'larger-than-a-step': '16', 'rounded-up': '66|accum_bs|65',
    'micro-batch-size': '64|16', 'micro-batch-size/cache': '64|16', 'cannot-be-split': 'Graph||64',
    'cannot-be-split/targets': '0|16|64', 'no-lengths': 'TokenBudget(8192)',
    'no-lengths/no-tokens': 'TokenBudget(8192)', 'two-callbacks': '2',
    'two-callbacks/of-a-class': '2|NoiseScale',
    'own-training-loop': 'one_batch', 'middle-of-an-epoch': 'GradientAccumulation',
    'second-optimizer': 'CycleGANTrainer', 'no-step-in-a-trial': '64',
    'no-step-in-a-trial/accum-find': '3|20', 'samples-to-check': '5000|1400',
    'one-process': 'accum_check|2', 'no-rows': 'float', 'segments/outside': 'Linear',
    'segments/nested': "'0.1'|'0'", 'compiled-model': 'Sequential',
    'whole-number': 'accum_bs||samples|64.0|float|', 'whole-number/below-one': 'accum_bs|0',
    'true-or-false': 'verbose|True or False|16|int',
    'unknown-name': "mode|'power' or 'binsearch'|'binary'", 'arguments-by-name': 'GradientCache|16|16',
    'unknown-argument': 'GradientAccumulation|accumulate',
    'unknown-argument/similar': 'GradientAccumulation|accumulate',
    'function-argument': 'n_items|1|argument', 'start-and-finish': 'start',
    'start-and-finish/not-finite': 'start|-0.5', 'start-and-finish/order': '5|2',
    'schedule-function': 'f|64|512', 'schedule-function/result': '64|512|3',
    'schedule-function/error': 'ZeroDivisionError|…|0', 'schedule-function/value': '-8.0|1',
    'scheduling-dict/type': '0.5|{0.5:2}|float', 'scheduling-dict/key': '-1|{-1:2}',
    'scheduling-dict/value': '0|{0:0}', 'batchnorm': '20 BatchNorm layers normalize|16',
    'batchnorm/cache': 'BatchNorm2d', 'no-batchnorm': 'all BatchNorm layers are frozen',
    'no-batchnorm/callback': 'all BatchNorm layers are frozen', 'fresh-batchnorm': '20',
    'loss-not-a-mean': 'mean|samples', 'changed-loss': 'Penalty', 'changed-buffer': 'codes',
    'mixed-in-micro-batches': 'MixUp|16',
    'loader-order': 'LMDataLoader cuts the text into as many streams as …', 'hidden-state': 'LSTM',
    'processes-with-different-settings': '`accum_bs`|64, 32',
}

def slug(heading):
    "Return the key of an entry from its heading"
    return re.sub(r'[^a-z0-9]+', '-', heading.lower()).strip('-')

def messages():
    "Return the messages of the catalogue, with `blank` in place of their fields"
    def shown(name):
        return re.sub(r'{{|}}|{[^{}]+}', lambda m: m[0][0] if m[0] in ('{{','}}') else blank, template_of(name))
    kinds = {name: 'Added to an error' if o.kind=='Note' else o.kind for name,o in catalogue.items()}
    return [Message(name, name.partition('/')[0], kind, shown(name)) for name,kind in kinds.items() if kind!='Phrase']

def anchors(text):
    "Return a dict from the keys with an entry in the text of a cell to the heading above the entry"
    titles = {slug(head): head for head in re.findall('^### (.+)', text, re.M)}
    return titles | {m[1]: re.findall('^##+ (.+)', text[:m.start()], re.M)[-1] for m in re.finditer(span, text)}

def short(text, n, more=0):
    "Return the first `n` words of a message, or all words if at most `more` follow; code counts as one word"
    found = [o for o in re.finditer(r'(?:`[^`]*`|[^\s`])+', text) if o[0].strip('(),.:;')!=blank]
    if len(found)<=n+more: return text
    text = re.sub(r'[.:;] (\S+ ?){1,3}$', '', text[:found[n-1].end()].rstrip(f',;:. {blank}'))   # drop a cut sentence
    text = text.rstrip(f' {blank}')
    return f'{text.rpartition("(")[0].rstrip(",;: ") if text.count("(")>text.count(")") else text} {blank}'

def quotation(o):
    "Return the beginning of a message; with values, it may be longer"
    given = iter(values.get(o.name, '').split('|'))
    text = re.sub(blank, lambda m: next(given, blank), o.text) if o.name in values else o.text
    text = re.sub(f'{blank}( ?{blank})+', blank, text)
    return short(text, 7, 4) if o.name in values else short(text, 6)

def quoted(found, *keys):
    "Return the Markdown of the messages in `found` that have one of the keys"
    def escaped(text): return re.sub(r'(`[^`]*`)|([*<|])', lambda m: m[1] or f'\\{m[2]}', text)
    texts = sorted({(o.kind, quotation(o)) for o in found if o.key in keys})
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
