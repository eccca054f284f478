"""Count the words on the pages for users: `python tools/words.py`.

The table has a row for each notebook: the words of its Markdown cells, and how many of them stand in sentences, in
tables, in blocks of code, and in the settings of the first cell, such as the keywords for the search, which readers do
not see. A word has a letter or a digit: the bars of a table are no words. Pages for contributors, which are those in
the other folders of `nbs`, are not counted.
"""
import json, re
from pathlib import Path

nbs = Path(__file__).resolve().parent.parent/'nbs'
user_folders = '.','guides','reference','about'

def n_words(text): return sum(bool(re.search(r'\w', o)) for o in text.split())

def n_words_in(pattern, text): return sum(n_words(o[0]) for o in re.finditer(pattern, text, re.M|re.S))

def count(text, has_settings):
    "Return the number of words in the Markdown of a cell: all, in sentences, in tables, in code, in settings"
    code = n_words_in(r'^```.*?^```', text)
    rest = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
    tables = n_words_in(r'^\|[^\n]*', rest)
    settings = n_words_in(r'^- \w+: [^\n]*', rest) if has_settings else 0
    total = n_words(text)
    return total,total-tables-code-settings,tables,code,settings

def counts(fn):
    "Return the sums of `count` over the Markdown cells of the notebook `fn`, whose first cell has the settings"
    cells = json.loads(fn.read_text(encoding='utf-8'))['cells']
    found = [count(''.join(c['source']), not i) for i,c in enumerate(cells) if c['cell_type']=='markdown']
    return [sum(o) for o in zip(*found)]

def main():
    rows = [(fn.relative_to(nbs).with_suffix('').as_posix(), *counts(fn))
        for folder in user_folders for fn in sorted((nbs/folder).glob('*.ipynb'))]
    rows.append(('total', *map(sum, list(zip(*rows))[1:])))
    for name,*ns in [('page','words','sentences','tables','code','settings'), *rows]:
        print(f'{name:28}' + ''.join(f'{o:>10}' for o in ns))

if __name__=='__main__': main()
