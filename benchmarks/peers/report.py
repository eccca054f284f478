"The results as Markdown tables, for the terminal and the pages."
from .. import table

# Each case in a few words, for the head of a column
names = dict(A='every step full', B250='smaller last micro-batch', B240='last step a micro-batch short',
    B200='last step of 8 samples', B48='epoch shorter than a step', C40='steps of 40', padded='padded tokens',
    ignored='a micro-batch all ignored', clip='clipping', fp16='fp16', cycle='one-cycle', again='second fit',
    interrupt='fit after an interrupt', loss='recorded loss', zero='steps of 0', negative='steps of -64')
weights = ['A','B250','B240','B200','B48','C40'],['padded','ignored','clip','fp16','cycle','again','interrupt']

# What a reader wants to know first: columns, and the cases that are behind each
first = {'all steps full':['A'], 'incomplete last step':['B250','B240','B200','B48'], 'any step size':['C40'],
    'padded targets':['padded','ignored'], 'one-cycle':['cycle'], 'later fits':['again','interrupt']}

def summary(right, fast):
    "Who is right in what: a row for each peer, fastaccum's first, and what a micro-batch of a tiny model costs"
    def mark(p, keys):
        found = [p['cases'][k] for k in keys]
        if all(o['outcome'] in ('refused','not supported') for o in found): return '–'
        if not all(o['outcome']=='ran' and o['weights']<1e-8 for o in found): return '✗'
        takes_other_size = 'C40' in keys and p['cases']['C40']['step_of']!=40   # whole micro-batches
        return '✓\\*' if takes_other_size else '✓'
    def cost(nm): return f"{fast['cost']['tiny'][nm]['4']['to_bare']:.1f}" if nm in fast['arms'] else ''
    peers = sorted(right['peers'].items(), key=lambda o: o[0]!='fastaccum')
    return table(['',*first,'time (loop = 1)'], [[f"**{p['title']}**" if nm=='fastaccum' else p['title'],
        *(mark(p, keys) for keys in first.values()), cost(nm)] for nm,p in peers])

# `right`

def number(v):
    if v is None: return '–'
    if v=='inf': return 'NaN'
    return '0' if v==0 else f'{v:.0e}' if v<1e-3 or v>=1e3 else f'{v:.2g}'

def weight(o):
    "How far the weights are off, or why that is not known"
    if o['outcome']!='ran': return o['outcome']
    wrong = f" ({o['steps']} of {o['expected']})" if o['steps']!=o['expected'] else ''
    return number(o['weights'])+wrong

def loss(o):
    if o['outcome']!='ran': return o['outcome']
    if o['recorded'] is None: return 'by hand'
    return number(o['loss']) if o['loss'] is not None else f"{o['recorded']} recorded for {o['expected']} steps"

def rates(o):
    if o['outcome']!='ran': return o['outcome']
    return number(o['lr']) if o['lr'] is not None else f"{o['steps']} of {o['expected']} steps"

def bad(o): return o.get('what') or f"{o['outcome']}: {o['why'].split(':')[0]}"

def grid(res, columns):
    "A row for each peer; `columns` has heads, and for each the key of a case and a function of its outcome"
    return table(['',*columns], [[p['title'],*(f(p['cases'][key]) for key,f in columns.values())]
        for p in res['peers'].values()])

def whys(res):
    "Why there is no figure: a row for each reason, with the cases and the peers"
    seen = {}
    for p in res['peers'].values():
        for c,o in p['cases'].items():
            if o['outcome']!='ran': seen.setdefault((c,o['outcome'],o['why']), []).append(p['title'])
    order = list(res['cases']).index
    rows = [[names[c],outcome,why.replace('|', '/'),'; '.join(ps)]
        for (c,outcome,why),ps in sorted(seen.items(), key=lambda o: order(o[0][0]))]
    return table(['case','outcome','why','who'], rows)

def right(res):
    "All tables of `right`"
    recorded = {'loss off by':('loss',loss), 'learning rate of one-cycle off by':('cycle',rates)}
    return '\n\n'.join([
        'The largest difference in any weight (1e-16 is rounding). In brackets: the steps taken and the steps '
            'expected, if they differ.',
        *(grid(res, {names[o]:(o,weight) for o in keys}) for keys in weights),
        'What is recorded:', grid(res, recorded),
        'Impossible sizes:', grid(res, {'0':('zero',bad), '-64':('negative',bad)}),
        'The cases:', table(['',''], [(names[k],v) for k,v in res['cases'].items()]),
        'The peers:', table(['','version','run as'], [[f"[{p['title']}]({p['docs']})",p['version'],p['how']]
            for p in res['peers'].values()]),
        'Why there is no figure:', whys(res), f"Measured {res['made']}."])

# `fast`

def times(res, model):
    "Microseconds per micro-batch, a row for each arm, with the ratio to the bare loop"
    return table(['µs per micro-batch',*(f'k = {k}' for k in res['cost'][model]['bare'])], [[res['arms'][nm],
        *(f"{o['us']:.0f} ({o['to_bare']:.2f})" for o in found.values())] for nm,found in res['cost'][model].items()])

def lightning(res):
    "What the variable that importing Lightning sets costs"
    rows = [[res['arms'][nm],f"{o['without']:.0f}",f"{o['set']:.0f}"] for nm,o in res['lightning'].items()]
    return table(['µs per micro-batch, k = 4','','`PYTORCH_NVML_BASED_CUDA_CHECK=1`'], rows)

def fast(res):
    "All tables of `fast`"
    return '\n\n'.join([
        'A tiny model, with k micro-batches in a step; in brackets, the ratio to the bare loop:', times(res, 'tiny'),
        'A transformer:', times(res, 'transformer'),
        'A tiny model in a process that has imported Lightning:', lightning(res), f"Measured {res['made']}."])
