"The structure of the package: allowed imports, limits on its size, and documentation of public names."
import ast, pytest, re
from pathlib import Path
from fastaccum.base.messages import catalogue
from common import message_calls

root = Path(__file__).resolve().parent.parent
lib,most_modules,most_lines,longest_chain = root/'fastaccum',36,500,8
# the folders from the ground up, and on each floor the folders from which it may import; the top floor
# has the modules that users import
floors = {'base': '', 'restore': 'base', 'step': 'base restore', 'whole': 'base restore step',
    'tell': 'base restore step whole', 'check': 'base restore step tell whole'}
# optional packages: only the named module may import a package, and no module may import one with None
only_in = {'wandb': 'wandb.py'} | dict.fromkeys(('tensorboard','accelerate','PIL','transformers','timm'))

def name_of(fn): return '.'.join(fn.relative_to(root).with_suffix('').parts)
def floor_of(nm): return nm.split('.')[1] if nm.count('.')>1 else ''

texts = {o: o.read_text(encoding='utf-8') for o in sorted(lib.rglob('*.py')) if o.name[0]!='_'}
modules = {name_of(o): ast.parse(text) for o,text in texts.items()}

def imports(nm):
    "Yield the names of the modules that the module `nm` imports, at its top or within a function"
    here = nm.split('.')
    for o in ast.walk(modules[nm]):
        if isinstance(o, ast.Import): yield from (a.name for a in o.names)
        elif isinstance(o, ast.ImportFrom):
            base = o.module
            if o.level: base = '.'.join([*here[:len(here)-o.level], *(base or '').split('.')]).rstrip('.')
            is_folder = base=='fastaccum' or base.removeprefix('fastaccum.') in floors
            if is_folder: yield from (f'{base}.{a.name}' for a in o.names)
            else: yield base

# for each module of fastaccum, the modules of fastaccum that it imports
ours = {nm: {o for o in imports(nm) if o.split('.')[0]=='fastaccum'} for nm in modules}

def test_a_folder_imports_only_from_itself_and_from_the_floors_below():
    def allowed(nm): return {floor_of(nm), *floors[floor_of(nm)].split()}
    assert not {nm:os for nm,os in ours.items() if floor_of(nm) and not {*map(floor_of, os)}<=allowed(nm)}
    assert {*map(floor_of, modules)}=={'',*floors}

def test_no_module_imports_testing():
    assert not [nm for nm,os in ours.items() if 'fastaccum.testing' in os]

def test_imports_form_no_circle_and_no_long_chain():
    graph = {k:v&modules.keys() for k,v in ours.items()}
    chain = {}   # for each module, the longest chain of imports that begins with this module
    while len(chain)<len(graph):
        free = {k for k,v in graph.items() if k not in chain and v<=chain.keys()}
        assert free, f'these import each other: {sorted(graph.keys()-chain)}'
        chain |= {k: [k, *max((chain[o] for o in graph[k]), key=len, default=[])] for k in free}
    assert len(longest := max(chain.values(), key=len))<=longest_chain, ' -> '.join(longest)

def test_the_package_and_each_module_are_small():
    "The texts of messages do not count: they stand together in one module"
    assert len(modules)<=most_modules
    code = {o.name: re.sub(r'add_messages\(""".*?"""\)', '', text, flags=re.S) for o,text in texts.items()}
    assert not {nm:n for nm,text in code.items() if (n := len(text.splitlines()))>most_lines}

def test_optional_packages_are_imported_in_one_place_or_nowhere():
    tops = {(fn.name,nm.split('.')[0]) for fn in texts for nm in imports(name_of(fn))}
    assert not [(fn,o) for fn,o in tops if only_in.get(o, fn)!=fn]

def test_lines_have_at_most_120_characters():
    "Only the lines with `__all__`, which nbdev writes at the top of each module, may be longer"
    folders = 'tools','docs','benchmarks','tests'
    files = [root/'conftest.py', root/'setup.py', *texts, *(o for d in folders for o in (root/d).rglob('*.py'))]
    def own(fn): return re.sub(r'^# %% auto.*?(?=^# %%)', '', fn.read_text(encoding='utf-8'), flags=re.M|re.S)
    assert not {fn.name:l for fn in files for l in own(fn).splitlines() if len(l)>120}

# Documentation of public names

def public_functions():
    "Yield for each public function or method: name, syntax node, and docstring of its class or ''"
    def public(o): return isinstance(o, ast.FunctionDef) and (not o.name.startswith('_') or o.name=='__init__')
    for nm,tree in modules.items():
        for o in tree.body:
            if public(o): yield f'{nm}.{o.name}',o,''
            elif isinstance(o, ast.ClassDef) and not o.name.startswith('_'):
                for m in filter(public, o.body):
                    if not any('setter' in ast.unparse(d) for d in m.decorator_list):
                        yield f'{nm}.{o.name}.{m.name}',m,ast.get_docstring(o) or ''

def test_parameters_have_types():
    def args(o): return (*o.args.posonlyargs,*o.args.args,*o.args.kwonlyargs)
    assert not [f'{nm}({a.arg})' for nm,o,_ in public_functions() for a in args(o)
        if a.arg not in ('self','cls') and a.annotation is None]

# for each call of `refuse`, by its place, the classes of the errors that it may return
refused = {(nm,o.lineno): {catalogue[k].kind for k in keys} for nm,tree in modules.items()
    for o,keys,_ in message_calls(tree)}

def raised(o, nm):
    "Yield the names of the exceptions that the function `o` of the module `nm` raises in its own body"
    for s in ast.iter_child_nodes(o):
        if isinstance(s, (ast.FunctionDef,ast.Lambda,ast.ClassDef)): continue
        if isinstance(s, ast.Raise) and isinstance(s.exc, ast.Call):
            yield from refused.get((nm,s.exc.lineno), [ast.unparse(s.exc.func).split('.')[-1]])
        yield from raised(s, nm)

def module_of(nm):
    "Return the name of the module that contains the function or method `nm`"
    return max((o for o in modules if nm.startswith(f'{o}.')), key=len)

def test_each_exception_that_is_raised_is_documented():
    "The docstring of the function or of its class has a line such as `ValueError: when`"
    assert not [f'{nm}: {e}' for nm,o,doc in public_functions() for e in raised(o, module_of(nm))
        if not e.startswith('Cancel') and f'{e}:' not in (ast.get_docstring(o) or '')+doc]
