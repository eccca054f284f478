"The results as Markdown tables, for the terminal, the results folder, and the page in the docs."
import datetime, os, platform
from importlib.metadata import version
from .right import number

def about(note=None):
    "When and where this is run"
    import fastaccum, torch
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    machine = f'{cores} CPU cores, {platform.machine()}, {torch.get_num_threads()} thread'
    res = dict(date=f'{datetime.date.today()}', machine=machine, python=platform.python_version(),
        torch=torch.__version__, fastai=version('fastai'), fastaccum=fastaccum.__version__)
    return res | (dict(note=note) if note else {})

def table(head, rows): return '\n'.join('| '+' | '.join(map(str, o))+' |' for o in [head, ['---']*len(head), *rows])

def cell(o, key):
    "A figure of an outcome, or why there is none"
    if o['outcome']!='ran': return o['outcome']
    if key=='weights' and o.get('steps')!=o.get('expected'):
        return f"{number(o['weights'])} ({o['steps']} of {o['expected']})"
    if key=='loss' and o.get('loss') is None:
        return 'by hand' if o.get('recorded') is None else f"{o['recorded']} recorded for {o['expected']} steps"
    if key=='lr' and o.get('lr') is None: return f"{o['steps']} of {o['expected']} steps"
    return number(o[key])

def grid(res, keys, key):
    "A row for each peer, a column for each case"
    return table(['']+[names[o] for o in keys], [[p['title']]+[cell(p['cases'][c], key) for c in keys]
        for p in res['peers'].values()])

def whys(res):
    "Why there is no figure: a row for each reason, with the cases and the peers"
    seen = {}
    for p in res['peers'].values():
        for c,o in p['cases'].items():
            if o['outcome']!='ran': seen.setdefault((c,o['outcome'],o['why']), []).append(p['title'])
    order = list(res['cases']).index
    rows = [[names.get(c, res['cases'][c]),outcome,why.replace('|', '/'),'; '.join(ps)]
        for (c,outcome,why),ps in sorted(seen.items(), key=lambda o: order(o[0][0]))]
    return table(['case','outcome','why','who'], rows)

def bad(res):
    def say(o): return o.get('what') or f"{o['outcome']}: {o['why'].split(':')[0]}"
    return table(['','0','-64'], [[p['title']]+[say(p['cases'][c]) for c in ('zero','negative')]
        for p in res['peers'].values()])

def found(res):
    def lr(o):
        if o['outcome']!='ran': return o['outcome']
        return f"{o['steps']} of {o['expected']} steps, losses off by {number(o['loss'])}"
    def metric(o): return number(o['metric']) if o['outcome']=='ran' else o['outcome']
    rows = [(p['title'],p['cases']) for p in res['peers'].values()]
    heads = 'loss off by','learning rate of one-cycle off by','training accuracy off by','learning rate finder'
    return table(['',*heads],
        [[nm, cell(c['loss'], 'loss'), cell(c['cycle'], 'lr'), metric(c['metrics']), lr(c['lr_find'])]
            for nm,c in rows])

def made(res):
    a = res['about']
    note = f"; {a['note']}" if a.get('note') else ''
    return f"{a['date']}; {a['machine']}; python {a['python']}, torch {a['torch']}, fastai {a['fastai']}{note}"

def hows(res):
    return table(['','version','run as'], [[f"[{p['title']}]({p['docs']})",p['version'],p['how']]
        for p in res['peers'].values()])

# Each case in a few words, for the head of a column
names = dict(A='every step full', B250='ragged last micro-batch', B240='last step a micro-batch short',
    B200='last step of 8 samples', B48='epoch shorter than a step', C40='steps of 40', padded='padded tokens',
    ignored='a micro-batch all ignored', clip='clipping', fp16='fp16', cycle='one-cycle', again='second fit',
    interrupt='fit after an interrupt', loss='recorded loss', metrics='training accuracy', lr_find='finder',
    zero='steps of 0', negative='steps of -64')
ends,others = ['A','B250','B240','B200','B48','C40'],['padded','ignored','clip','fp16','cycle','again','interrupt']

# What a reader wants to know first: columns, and the cases that are behind each
first = {'only full steps':['A'], 'incomplete last step':['B250','B240','B200','B48'], 'any step size':['C40'],
    'padded targets':['padded','ignored'], 'one-cycle':['cycle'], 'second fit':['again','interrupt']}

def summary(right, fast):
    "Who is right in what: a row for each peer, fastaccum's first, and what a micro-batch of a tiny model costs"
    def mark(p, keys):
        found = [p['cases'][k] for k in keys]
        if all(o['outcome'] in ('refused','cannot express') for o in found): return '–'
        rounded = '\\*'*('C40' in keys and p['cases']['C40'].get('step_of')!=40)   # it takes whole micro-batches
        return f'✓{rounded}' if all(o['outcome']=='ran' and o['weights']<1e-8 for o in found) else '✗'
    def cost(nm):
        return f"{fast['cost']['tiny'][nm]['4']['to_bare']:.1f}" if nm in fast['arms'] else ''
    peers = sorted(right['peers'].items(), key=lambda o: o[0]!='fastaccum')
    return table(['',*first,'time (loop = 1)'], [[f"**{p['title']}**" if nm=='fastaccum' else p['title'],
        *(mark(p, keys) for keys in first.values()), cost(nm)] for nm,p in peers])

def right(res):
    "All tables of `right`"
    return '\n\n'.join(['# Right: how far from the run on real big batches', made(res),
        'Largest difference of a weight (1e-16 is rounding); in brackets the number of steps where it is wrong',
        grid(res, ends, 'weights'), grid(res, others, 'weights'),
        'What is recorded and found', found(res), 'Sizes that cannot be', bad(res),
        'The cases', table(['',''], [(names[k],v) for k,v in res['cases'].items()]),
        'The peers', hows(res), 'No figure', whys(res)])

# Who has no row in `fast`, and why
not_fast = """Composer is not here. All the others are given micro-batches that are ready, so that nothing but the work
around them is measured; Composer takes the big batch from the loader and splits it, and its figure would include
that. Where a library ran in several configurations, one was timed: fastxtend with `drop_last=False`, accelerate with
`accumulate()`, transformers with `num_items_in_batch`.""".replace('\n', ' ')

def times(res, model, ks, unit, f=lambda v: f'{v:.0f}'):
    "A row for each arm, with the ratio to the bare loop"
    arms = res['cost'][model]
    rows = []
    for nm,o in arms.items():
        rows.append([res['arms'][nm]['title']]+[f"{f(o[k]['median'])} ({o[k]['to_bare']:.2f})" for k in ks])
    return table([unit]+[f'k = {k}' for k in ks], rows)

def growth(res, key, unit):
    arms = res['growth'][key]
    sizes = list(next(iter(arms.values())))
    return table([unit]+sizes, [[res['arms'][nm]['title']]+[f'{o[s]:.0f}' for s in sizes] for nm,o in arms.items()])

def memory(res):
    bare = res['memory']['bare']['peak']
    def more(n): return f'{(n-bare)/2**10:+.1f} KiB' if abs(n-bare)<2**20 else f'{(n-bare)/2**20:+.1f} MiB'
    return table(['','most alive at a time','to the bare loop'],
        [[o['title'],f"{o['peak']/2**20:.1f} MiB",more(o['peak'])] for o in res['memory'].values()])

def where(res):
    "Microseconds of a micro-batch, by what is done in them, and how much that is of all"
    rows = []
    for model,arms in res['where'].items():
        for nm,o in arms.items():
            all = sum(o.values())
            rows.append([model,res['arms'][nm]['title'],f'{all:.0f}',*(f'{v:.0f} ({v/all:.0%})' for v in o.values())])
    return table(['model','','all',*next(iter(res['where']['tiny'].values()))], rows)

def fast(res):
    "All tables of `fast`"
    ks = ['1','4','16']
    return '\n\n'.join(['# Fast: what a micro-batch costs', made(res), not_fast,
        'Microseconds per micro-batch of a tiny model, and in brackets to the bare loop', times(res, 'tiny', ks, 'µs'),
        'Samples per second of a convolutional network, and in brackets to the bare loop',
        times(res, 'conv', ks, 'samples/s'),
        'Samples per second of a transformer, and in brackets to the bare loop',
        times(res, 'transformer', ks, 'samples/s'),
        'Memory of the tensors made by a fit of a transformer, k = 4', memory(res),
        'Where the microseconds of a micro-batch go, k = 4', where(res),
        'Growth with k: µs per micro-batch of the tiny model', growth(res, 'k', 'k'),
        'Growth with the number of parameters: µs per micro-batch, k = 4', growth(res, 'parameters', 'tensors'),
        'Growth with the number of callbacks that do nothing: µs per micro-batch, k = 4',
        growth(res, 'callbacks', 'callbacks')])
