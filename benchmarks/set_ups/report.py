"The table of the page"
import re
from .data import full, micro

def link(key): return f'[{key}](../reference/messages.ipynb#{key})'
def links(keys): return ', '.join(map(link, keys))

def verdict(o):
    "In a few words: same run, what is said, or neither"
    if 'error' in o: return f"error: {o['error']}" if ':' in o['error'] else f"refused: {link(o['error'])}"
    if not o['differs']: return 'same run' + (f", but warned of: {links(o['said'])}" if o['said'] else '')
    still = o['still']
    rest = ', else the same run' if 'differs' in still and not still['differs'] else ''
    if o['said']: return f"warned of: {links(o['said'])}{rest}"
    return 'other random numbers'+rest if rest else '**differs, nothing is said**'

def kind(o):
    "Of a verdict, for counting"
    v = verdict(o)
    if v.startswith('same run'): return 'same'
    return next(k for k in ('warned','refused','other random','error','**') if v.startswith(k))

def checked(o):
    "What the check says"
    if 'error' in o: return verdict(o)
    if o['ok']: return 'same run'
    def names(where): return ', '.join(dict.fromkeys(re.findall(r'(?:^|; |not seen: )([A-Z]\w+)', where)))
    found = {k:names(v) for k,v in o['off'].items() if k not in ('gradients','buffers')}
    return '; '.join(f'{k}: {v}' if v else k for k,v in found.items()) or 'gradients'

def row(o):
    cache = ''
    if 'cache' in o:
        c = o['cache'].get('still', o['cache'])
        cache = 'same run' if 'differs' in c and not c['differs'] else verdict(o['cache'])
    source = f"[{o['repo'].split('/')[1]}](https://github.com/{o['repo']}), `{o['path'].split('/')[-1]}`"
    return f"| {o['what']} | {source} | {verdict(o['loader'])} | {verdict(o['split'])} | {cache} | {checked(o['check'])} |"

def table(res):
    head = ['set-up','from',f'loader of {micro}, `GradientAccumulation({full})`',
        f'loader of {full}, `micro_batch_size={micro}`',f'`GradientCache(micro_batch_size={micro})`','`accum_check`']
    return '\n'.join([f"| {' | '.join(head)} |", '|---'*len(head)+'|', *map(row, res['set_ups']), '', f"Made {res['made']}."])
