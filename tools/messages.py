"""Write the messages of the package into nbs/reference/messages.ipynb, as the code has them; with `--check`, say
whether they are in step.

Each message of an error or a warning ends with `see('key')`, or is given to `said.once('key', …)`. The page has an
entry for each key: a heading that is the key in words, the beginnings of the messages below it, which are written here,
and what somebody wrote about cause and remedy. An entry can be for several keys, and a row of a table can be an entry:
each key is then a `<span id="key"></span>`, below the heading or at the beginning of the row. Nothing is imported.
"""
import ast, json, re, sys
from pathlib import Path
from typing import NamedTuple

root = Path(__file__).resolve().parent.parent
lib,nb_path = root/'fastaccum',root/'nbs/reference/messages.ipynb'
blank = '…'   # what is another in each run

class Message(NamedTuple):
    "What a line of the package says"
    where:str # `module:line`
    kind:str # The error's class, or the warning's category
    key:str|None # `None` if there is none
    text:str # With `blank` for what is of a run

def words(o, env):
    "The text of an expression, as far as it stands in the code"
    if isinstance(o, ast.Constant): return o.value if isinstance(o.value, str) else blank
    if isinstance(o, ast.JoinedStr): return ''.join(words(v, env) for v in o.values)
    if isinstance(o, ast.FormattedValue): return words(o.value, env)
    if isinstance(o, ast.Name) and isinstance(env.get(o.id), ast.AST): return words(env[o.id], {**env, o.id:None})
    if isinstance(o, ast.BinOp) and isinstance(o.op, ast.Add): return words(o.left, env)+words(o.right, env)
    if isinstance(o, ast.IfExp): return words(o.orelse, env)
    return '' if called(o)=='see' else blank

def called(o): return getattr(o.func, 'attr', getattr(o.func, 'id', '')) if isinstance(o, ast.Call) else ''

def keys(o):
    "What `see` is given in an expression"
    return [c.args[0].value if isinstance(c.args[0], ast.Constant) else None for c in ast.walk(o) if called(c)=='see']

def is_error(cls): return re.search(r'(Error|Exception)\b', ' '.join(map(ast.unparse, cls.bases)))

def assigned(body):
    "Names that are written once, and what"
    res = {}
    for o in body:
        for s in ast.walk(o):
            if not isinstance(s, ast.Assign): continue
            for nm in (t.id for t in s.targets if isinstance(t, ast.Name)): res[nm] = None if nm in res else s.value
    return res

def said(o, cls):
    "Kind, key, and expression of the message that a node gives; `None` if it gives none"
    name,args = called(o),getattr(o, 'args', [])
    if isinstance(o, ast.Assign) and called(o.value).endswith('Error'):   # raised later
        return called(o.value),(keys(o.value) or [None])[0],o.value.args[0]
    if isinstance(o, ast.Raise):
        e = o.exc
        nm = called(e) or (e.id if isinstance(e, ast.Name) and e.id[0].isupper() else '')
        if not nm or nm.startswith('Cancel'): return None   # raised again, or fastai's signals
        msg = e.args[0] if isinstance(e, ast.Call) and e.args else ast.Constant('')
        return nm,(keys(msg) or [None])[0],msg
    if name=='added': return 'Exception',keys(args[1])[0],args[1]   # to an error of other code
    if name=='once':
        kind = next((a for a in args[2:3]), ast.Name('UserWarning'))
        return ast.unparse(kind),getattr(args[0], 'value', None),args[1]
    if name=='warn':
        kind = next((a for a in args[1:2]), ast.Name('UserWarning'))
        return ast.unparse(kind),(keys(args[0]) or [None])[0],args[0]
    if name=='__init__' and cls and args and keys(args[0]): return cls,keys(args[0])[0],args[0]
    return None

def _read(node, where, env, cls=''):
    for o in ast.iter_child_nodes(node):
        within = {**env, **assigned(o.body)} if isinstance(o, ast.FunctionDef) else env
        mine = said(o, cls)
        if mine:
            kind,key,msg = mine
            yield Message(f'{where}:{o.lineno}', kind, key, re.sub(f'{blank}+', blank, words(msg, env)))
        if not (isinstance(o, ast.FunctionDef) and o.name=='once'):   # it gives on what it was given
            yield from _read(o, where, within, o.name if isinstance(o, ast.ClassDef) else cls)

def messages():
    "All that the package says"
    res,own = [],set()   # classes that say it in their `__init__`, whoever raises them
    for fn in sorted(lib.rglob('*.py')):
        if fn.name=='_modidx.py': continue
        tree = ast.parse(fn.read_text(encoding='utf-8'))
        where = fn.relative_to(lib).with_suffix('').as_posix()
        res += _read(tree, where, assigned(o for o in tree.body if isinstance(o, ast.Assign)))
        own |= {o.name for o in ast.walk(tree) if isinstance(o, ast.ClassDef) and is_error(o)}
    return [o for o in res if o.key or o.kind not in own]

def slug(heading): return re.sub(r'[^a-z0-9]+', '-', heading.lower()).strip('-')

def short(text, n=12, more=3):
    "The beginning of a message: `n` words, or all of them if only a few `more` follow. Code stays whole"
    found = [*re.finditer(r'(?:`[^`]*`|[^\s`])+', text)]
    if len(found)<=n+more: return text
    text = text[:found[n-1].end()].rstrip(f',;:. {blank}')
    text = re.sub(r'[.:;] (\S+ ?){1,3}$', '', text)   # no beginning of another sentence
    if text.count('(')>text.count(')'): text = text.rpartition('(')[0].rstrip(',;: ')
    return f'{text} {blank}'

def quoted(found):
    "The beginnings of messages, as they stand on the page"
    lines = {}
    for o in found: lines.setdefault(short(o.text), set()).add(o.kind)
    def line(text, kinds):
        text = re.sub(r'(`[^`]*`)|([*<|])', lambda m: m[1] or f'\\{m[2]}', text)
        return f"**{', '.join(sorted(kinds))}:** {text}"
    return sorted(line(*o) for o in lines.items())

re_span = r'<span id="([a-z-]+)"></span>'
re_entry = re.compile(fr'^### (.+)\n\n((?:{re_span})*)\n*(?:(?:>.*\n)+\n)?', re.M)
re_row = re.compile(fr'^\| {re_span}.*?(?= \| )', re.M)

def entries(text): return [slug(h) for h in re.findall(r'^### (.+)$', text, re.M)]

def anchors(text):
    "The keys that have an entry on the page, each with the heading that it stands below"
    res,head = {},''
    for line in text.split('\n'):
        if line.startswith('### '): res[slug(line[4:])] = line[4:]
        if line.startswith('##'): head = line.lstrip('# ')
        res |= {k:head for k in re.findall(re_span, line)}
    return res

def filled(text, found):
    "A cell's text with the messages below the headings that are keys, and in the rows that are"
    def of(*keys): return quoted(o for o in found if o.key in keys)
    def put(m):
        mine = of(slug(m[1]), *re.findall(re_span, m[2]))
        above = f'{m[2]}\n\n' if m[2] else ''
        return f'### {m[1]}\n\n{above}' + ('\n>\n'.join(f'> {o}' for o in mine)+'\n\n' if mine else '')
    text = re_entry.sub(put, text)
    return re_row.sub(lambda m: f'| <span id="{m[1]}"></span>{"<br>".join(of(m[1]))}', text)

def main(check=False):
    nb,found = json.loads(nb_path.read_text(encoding='utf-8')),messages()
    for c in nb['cells']:
        if c['cell_type']=='markdown': c['source'] = filled(''.join(c['source']), found).splitlines(True)
    new = json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False)+'\n'
    if new==nb_path.read_text(encoding='utf-8'): return 0
    if check: return 'nbs/reference/messages.ipynb has not the messages of the code: python tools/messages.py'
    nb_path.write_text(new, encoding='utf-8')

if __name__=='__main__': sys.exit(main('--check' in sys.argv[1:]))
