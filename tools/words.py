"""Count the words on the pages for users: `python tools/words.py`.

The table has a row for each notebook. `words` are those in Markdown that pages for users show; they stand in sentences,
in tables, and in blocks of code. `module` are the words that only the page of a module for contributors shows, and
`settings` are those that no page shows, such as keywords for the search. A word has a letter or a digit: the bars of a
table are no words. The other folders of `nbs` are for contributors, and are not counted.
"""
import json, re
from pathlib import Path

nbs = Path(__file__).resolve().parent.parent/'nbs'
user_folders = '.','guides','reference','about'
user_sections = ('Why', 'One step, event by event', 'Examples', 'Caveats')   # of modules, as in docs/build.py

def n_words(text): return sum(bool(re.search(r'\w', o)) for o in text.split())

def n_words_in(pattern, text): return sum(n_words(o[0]) for o in re.finditer(pattern, text, re.M|re.S))

def shown_and_other(fn):
    "Return the Markdown of a notebook as two texts: what pages for users show, and what only contributors see"
    cells = json.loads(fn.read_text(encoding='utf-8'))['cells']
    texts = [''.join(c['source']) for c in cells if c['cell_type']=='markdown']
    if not re.match('[0-9]', fn.name): return '\n\n'.join(texts),''
    shown,other,is_shown = [],[],True
    for text in texts:
        head = re.match('## (.+)', text)
        if head: is_shown = head[1].strip() in user_sections
        (shown if is_shown else other).append(text)
    # a module without these sections has no page for users
    has_page = re.search('^## (Examples|Caveats)', '\n'.join(shown), re.M)
    return tuple('\n\n'.join(o) for o in ((shown,other) if has_page else ([],shown+other)))

def counts(fn):
    "Return the number of words in the notebook `fn`: shown, in sentences, tables and code, in the module, in settings"
    text,other = shown_and_other(fn)
    settings = r'^- (?:keywords|api|inner): [^\n]*'
    n_settings = n_words_in(settings, text)+n_words_in(settings, other)
    text = re.sub(settings, '', text, flags=re.M)
    code = n_words_in(r'^```.*?^```', text)
    rest = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
    tables = n_words_in(r'^\|[^\n]*', rest)
    return n_words(text),n_words(rest)-tables,tables,code,n_words(re.sub(settings, '', other, flags=re.M)),n_settings

def main():
    rows = [(fn.relative_to(nbs).with_suffix('').as_posix(), *counts(fn))
        for folder in user_folders for fn in sorted((nbs/folder).glob('*.ipynb'))]
    rows.append(('total', *map(sum, list(zip(*rows))[1:])))
    for name,*ns in [('page','words','sentences','tables','code','module','settings'), *rows]:
        print(f'{name:28}' + ''.join(f'{o:>10}' for o in ns))

if __name__=='__main__': main()
