"What came of the set-ups, in words, and the table of them."
import re
from collections import Counter
from .data import full, micro, set_ups

def links(keys): return ', '.join(f'[{o}](../reference/messages.ipynb#{o})' for o in keys)

kinds = dict(same='gave the same run', warned='differed and said so in a warning',
    draws='differed only in random numbers', refused='stopped before training with an error that says what to do',
    error="failed in the set-up's own code", more='differed in two ways and warned about only one',
    silent='differed without a warning')

def kind(o):
    "One of `kinds`"
    if 'error' in o: return 'error' if ':' in o['error'] else 'refused'
    if not o['differs']: return 'same'
    still = o.get('still', {})
    if o['said']: return 'more' if still.get('differs') and not still['said'] else 'warned'
    return 'silent' if o['still'].get('differs', True) else 'draws'

def verdict(o, alone=''):
    "The same run, or what is said; `alone` differs without a warning"
    k = kind(o)
    if k=='same': return 'same run' + f", but warns: {links(o['said'])}"*bool(o['said'])
    if k=='error': return f"**{o['error']}**"
    if k=='refused': return f"refused: {links([o['error']])}"
    if k=='silent': return '**a different run without a warning**'
    rest = ', else the same run' if o['still'].get('differs')=={} else ''
    if k=='draws': return 'other random numbers'+rest
    if k=='more': rest = f", **and {alone or 'something'} differs without a warning**"
    return f"warns: {links(o['said'])}"+rest

def checked(o):
    "What the check says"
    if 'error' in o: return verdict(o)
    if o['ok']: return 'same run'
    def names(where): return ', '.join(dict.fromkeys(re.findall(r'(?:^|; |not (?:seen|checked): )([A-Z]\w+)', where)))
    found = {k:names(v) for k,v in o['off'].items() if k not in ('gradients','model state')}
    return '; '.join(f'{k}: {v}' if v else k for k,v in found.items()) or 'gradients'

def with_cache(o):
    "Does it become the same run with `GradientCache`?"
    if 'cache' not in o: return ''
    o = o['cache']
    if kind(o)=='same': return '; with `GradientCache` the same run'
    return '; with `GradientCache` the same but for BatchNorm'*(kind(o)=='warned' and o['still'].get('differs')=={})

def row(nm, o):
    s = set_ups[nm]
    source = f"{s.what} ([{s.repo.split('/')[1]}](https://github.com/{s.repo}), {s.path.split('/')[-1]})"
    cells = source,verdict(o['loader'], s.alone)+with_cache(o),verdict(o['split'], s.alone),checked(o['check'])
    return f"| {' | '.join(cells)} |"

def counts(found, way):
    n = Counter(kind(o[way]) for o in found.values())
    return ', '.join(f'{n[k]} {nm}' for k,nm in kinds.items() if n[k])

def table(found, made):
    "`found` has for each set-up what `run` returns"
    head = ['set-up',f'loader of {micro}',f'loader of {full}, split','check']
    intro = f"{len(found)} set-ups. On a loader of {micro}: {counts(found, 'loader')}. On a loader of {full}, split: " \
        f"{counts(found, 'split')}."
    return '\n'.join([intro, '', f"| {' | '.join(head)} |", '|---'*len(head)+'|', *(row(*o) for o in found.items()), '',
        f"Made {made}."])
