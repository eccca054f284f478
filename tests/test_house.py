"The package as a house: who may use whom, how large it may be, and what a public name says of itself."
import ast, re
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
lib = root/'fastaccum'

# What users import stands in the package itself; what it is made of in `core`, which uses nothing above it
may_use = {'doors': {'doors','core'}, 'core': {'core'}}
most_modules,most_lines,longest_chain = 45,320,6
longer = {}
optional = {'wandb': 'wandb.py'}   # a package that need not be installed, and the only module that may import it
never = {'tensorboard','accelerate','PIL','transformers','timm'}

modules = sorted(o for o in lib.rglob('*.py') if o.name not in ('__init__.py','_modidx.py'))
ids = lambda o: o.relative_to(lib).as_posix() if isinstance(o, Path) else None

def name_of(fn): return '.'.join(fn.relative_to(root).with_suffix('').parts)
def room_of(module): return 'core' if module.startswith('fastaccum.core.') else 'doors'

def imports(fn):
    "The modules that a module imports, wherever in it, and whether they are ours"
    here = name_of(fn).split('.')
    for o in ast.walk(ast.parse(fn.read_text(encoding='utf-8'))):
        if isinstance(o, ast.Import):
            for a in o.names: yield a.name,a.name.split('.')[0]=='fastaccum'
        elif isinstance(o, ast.ImportFrom):
            base = o.module
            if o.level: base = '.'.join([*here[:len(here)-o.level], *(base or '').split('.')]).rstrip('.')
            if base in ('fastaccum','fastaccum.core'):
                for a in o.names: yield f'{base}.{a.name}',True
            else: yield base,base.split('.')[0]=='fastaccum'

def ours(fn): return {nm for nm,own in imports(fn) if own}

@pytest.mark.parametrize('fn', modules, ids=ids)
def test_no_import_runs_upwards(fn):
    me = room_of(name_of(fn))
    wrong = [o for o in ours(fn) if room_of(o) not in may_use[me]]
    assert not wrong, f'{me} may use {sorted(may_use[me])}, but imports {wrong}'

def test_no_circle_and_no_long_chain():
    graph = {name_of(o): ours(o) & {name_of(p) for p in modules} for o in modules}
    chain = {}   # of each module, the longest way down
    while len(chain)<len(graph):
        free = {k for k,v in graph.items() if k not in chain and v<=chain.keys()}
        assert free, f'these import each other: {sorted(graph.keys()-chain)}'
        chain |= {k: [k, *max((chain[o] for o in graph[k]), key=len, default=[])] for k in free}
    longest = max(chain.values(), key=len)
    assert len(longest)<=longest_chain, ' -> '.join(longest)

def test_the_house_is_small():
    lines = {ids(o): len(o.read_text(encoding='utf-8').splitlines()) for o in modules}
    assert len(lines)<=most_modules
    assert not {k:n for k,n in lines.items() if n>longer.get(k, most_lines)}

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
