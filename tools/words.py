"""Count the words on the pages for users: `python tools/words.py`.

The table has a row for each notebook: the words of its Markdown cells, and how many of them stand in sentences, in
tables, and in blocks of code. Pages for contributors, which are those in the other folders of `nbs`, are not counted.
"""
import json, re
from pathlib import Path

nbs = Path(__file__).resolve().parent.parent/'nbs'
user_folders = '.','guides','reference','about'

def count(text):
    "Return the number of words in a Markdown text: all, in sentences, in tables, in blocks of code"
    without_code = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
    sentences = re.sub(r'^\|.*', '', without_code, flags=re.M)
    n_all,n_without_code,n_sentences = (len(o.split()) for o in (text, without_code, sentences))
    return n_all,n_sentences,n_without_code-n_sentences,n_all-n_without_code

def counts(fn):
    "Return the sums of `count` over the Markdown cells of the notebook `fn`"
    cells = json.loads(fn.read_text(encoding='utf-8'))['cells']
    texts = [''.join(c['source']) for c in cells if c['cell_type']=='markdown']
    return [sum(o) for o in zip(*map(count, texts))]

def main():
    rows = [(fn.relative_to(nbs).with_suffix('').as_posix(), *counts(fn))
        for folder in user_folders for fn in sorted((nbs/folder).glob('*.ipynb'))]
    rows.append(('total', *map(sum, list(zip(*rows))[1:])))
    for name,*ns in [('page','words','sentences','tables','code'), *rows]:
        print(f'{name:28}' + ''.join(f'{o:>10}' for o in ns))

if __name__=='__main__': main()
