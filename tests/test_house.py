"The rooms of the package: who may use whom, how long a line is, and what a public name says of itself."
import ast, re
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
lib = root/'fastaccum'

# A room, and the rooms it may use besides itself. The front doors stand in the package itself
wings = {'core': set(), 'processes': {'core'}, 'memory': {'core','processes'}}
wings |= {o: {'core','processes','memory'} for o in ('ways','check','noise')}
rooms = {'doors': {*wings}, **wings}
optional = {'wandb': 'wandb.py'}   # a package that need not be installed, and the only module that may import it
never = {'tensorboard','accelerate','PIL','transformers','timm'}

modules = sorted(o for o in lib.rglob('*.py') if o.name not in ('__init__.py','_modidx.py'))
ids = lambda o: o.relative_to(lib).as_posix() if isinstance(o, Path) else None

def name_of(fn): return '.'.join(fn.relative_to(root).with_suffix('').parts)
def room_of(module):
    parts = module.split('.')
    return parts[1] if len(parts)>2 and parts[1] in rooms else 'doors'

def imports(fn):
    "The modules that a module imports, wherever in it, and whether they are ours"
    here = name_of(fn).split('.')
    for o in ast.walk(ast.parse(fn.read_text(encoding='utf-8'))):
        if isinstance(o, ast.Import):
            for a in o.names: yield a.name,a.name.split('.')[0]=='fastaccum'
        elif isinstance(o, ast.ImportFrom):
            base = o.module
            if o.level: base = '.'.join([*here[:len(here)-o.level], *(base or '').split('.')]).rstrip('.')
            if base in ('fastaccum', *(f'fastaccum.{r}' for r in rooms)):
                for a in o.names: yield f'{base}.{a.name}',True
            else: yield base,base.split('.')[0]=='fastaccum'

def ours(fn): return {nm for nm,own in imports(fn) if own}

@pytest.mark.parametrize('fn', modules, ids=ids)
def test_no_import_runs_upwards(fn):
    me = room_of(name_of(fn))
    wrong = [o for o in ours(fn) if room_of(o)!=me and room_of(o) not in rooms[me]]
    assert not wrong, f'{me} may use {sorted(rooms[me])}, but imports {wrong}'

def test_no_circle():
    graph = {name_of(o): ours(o) & {name_of(p) for p in modules} for o in modules}
    done = set()
    while len(done)<len(graph):
        free = {k for k,v in graph.items() if k not in done and v<=done}
        assert free, f'these import each other: {sorted(graph.keys()-done)}'
        done |= free

def test_nobody_imports_testing():
    assert [o.name for o in modules if 'fastaccum.testing' in ours(o)]==[]

@pytest.mark.parametrize('fn', modules, ids=ids)
def test_optional_packages(fn):
    tops = {nm.split('.')[0] for nm,own in imports(fn) if not own}
    wrong = {o for o in tops if o in never or optional.get(o, fn.name)!=fn.name}
    assert not wrong

scripts = [*modules, *sorted(o for d in ('tools','docs','benchmarks','tests') for o in (root/d).rglob('*.py')),
    *sorted(root.glob('*.py'))]
@pytest.mark.parametrize('fn', scripts, ids=lambda o: o.relative_to(root).as_posix())
def test_lines(fn):
    "At most 120 characters, but for what nbdev writes"
    text = re.sub(r'^# %% auto.*?(?=^# %%)', lambda m: '\n'*m[0].count('\n'), fn.read_text(encoding='utf-8'),
        flags=re.M|re.S)
    long = [f'{i}: {len(l)}' for i,l in enumerate(text.splitlines(), 1) if len(l)>120]
    assert not long

# What a public name says of itself

def is_public(nm): return not nm.startswith('_') or nm=='__init__'

def patched(o):
    "The class that `@patch` gives the function to, if any"
    if not any('patch' in ast.unparse(d) for d in o.decorator_list): return None
    return ast.unparse(o.args.args[0].annotation)

def functions(fn):
    "The public functions and methods of a module, with the docstring of their class"
    for o in ast.parse(fn.read_text(encoding='utf-8')).body:
        if isinstance(o, ast.FunctionDef) and is_public(o.name): yield o.name,o,''
        elif isinstance(o, ast.ClassDef) and is_public(o.name):
            for m in o.body:
                setter = isinstance(m, ast.FunctionDef) and any('setter' in ast.unparse(d) for d in m.decorator_list)
                if isinstance(m, ast.FunctionDef) and is_public(m.name) and not setter:
                    yield f'{o.name}.{m.name}',m,ast.get_docstring(o) or ''

exported = [o for o in modules if o.name!='all.py']

@pytest.mark.parametrize('fn', exported, ids=ids)
def test_parameters_have_types(fn):
    bare = [f'{nm}({a.arg})' for nm,o,_ in functions(fn) for a in (*o.args.posonlyargs,*o.args.args,*o.args.kwonlyargs)
            if a.arg not in ('self','cls') and a.annotation is None]
    assert not bare

def raised(o):
    "The exceptions that a function raises in its own body"
    todo = list(o.body)
    while todo:
        s = todo.pop()
        if isinstance(s, (ast.FunctionDef,ast.Lambda,ast.ClassDef)): continue
        if isinstance(s, ast.Raise) and isinstance(s.exc, ast.Call): yield ast.unparse(s.exc.func).split('.')[-1]
        todo += list(ast.iter_child_nodes(s))

@pytest.mark.parametrize('fn', exported, ids=ids)
def test_what_is_raised_is_documented(fn):
    "`ValueError: when`, in the docstring of the function or of its class"
    silent = [f'{nm}: {e}' for nm,o,doc in functions(fn) for e in raised(o)
              if not e.startswith('Cancel') and f'{e}:' not in (ast.get_docstring(o) or '')+doc]
    assert not silent
