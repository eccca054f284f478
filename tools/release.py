"""Make a release, up to its tag: `make release VERSION=0.2.0`. Nothing is pushed; the last line says what to type.

The version, and the date of its section in the changelog, are written to the files that have them, then everything is
checked: tests, site, what is uploaded, and the wheel alone. If that passes there is a commit and a tag, else the files
are as before. If the files have that version already, and no tag does, it is checked and tagged, and there is nothing
to commit. What pushing the tag starts, .github/workflows/release.yml, uses this file too:

`--agree v0.2.0`  tag, version and changelog agree; writes the section of the changelog
`--example`       writes the example of README.md, a program
`--recipe SDIST`  writes the recipe for conda with that sdist's version and hash

Needs nothing but Python and git.
"""
import argparse, datetime, hashlib, os, re, subprocess, sys, tempfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
re_version = re.compile(r'(\d+)\.(\d+)\.(\d+)')
lib = 'fastaccum/__init__.py'
# Where the version stands besides the changelog: the pattern of its line, and of the line of the day
places = {lib: [r'^__version__ = "(.+)"$'],
    'CITATION.cff': [r'^version: (.+)$', r'^date-released: (.+)$'],
    'conda/recipe.yaml': [r'^  version: "(.+)"$']}

def stop(why): sys.exit(f'No release: {why}')

def read(nm): return (root/nm).read_text(encoding='utf-8')

def git(*args):
    res = subprocess.run(['git',*args], cwd=root, check=True, capture_output=True, text=True)
    return res.stdout.strip()

def version(): return re.search(places[lib][0], read(lib), re.M)[1]

def repository(): return re.search(r'^Repository *= *"(.+)"', read('pyproject.toml'), re.M)[1]

def numbers(o):
    "A version as a tuple that can be compared"
    m = re_version.fullmatch(o)
    if not m: stop(f'{o!r} is no version: give three numbers, as in 0.2.0')
    return tuple(map(int, m.groups()))

def section(name, text):
    "What the changelog says under `## [name]`, without that line; None if it has no such section"
    m = re.search(fr'^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## \[|^\[[^]]+\]: |\Z)', text, re.M|re.S)
    return m and m[1].strip()

def says_something(text): return any(o.strip() and not o.startswith('#') for o in (text or '').splitlines())

# What is written

def dated(text, new, day):
    "The changelog `text`, where what was unreleased is the version `new` of that day"
    url,before = repository(),re.findall(r'^## \[(\d[^]]*)\]', text, re.M)
    text = text.replace('## [Unreleased]\n', f'## [Unreleased]\n\n## [{new}] - {day}\n', 1)
    since = f'{url}/compare/v{before[0]}...v{new}' if before else f'{url}/releases/tag/v{new}'
    links = f'[Unreleased]: {url}/compare/v{new}...HEAD\n[{new}]: {since}'
    return re.sub(r'^\[Unreleased\]: .*$', links, text, flags=re.M)

def put(text, pattern, value):
    "`text` with `value` in place of what `pattern` found"
    m, = re.finditer(pattern, text, re.M)
    return text[:m.start(1)]+value+text[m.end(1):]

def written(new, day):
    "The files of the version `new`, by name; none if they have that version already"
    if new==version(): return {}
    files = {'CHANGELOG.md': dated(read('CHANGELOG.md'), new, day)}
    for nm,patterns in places.items():
        text = read(nm)
        for o,value in zip(patterns, (new, day)): text = put(text, o, value)
        files[nm] = text
    return files

# What is checked

def refusals(new):
    "Why there can be no release `new`, before anything is written"
    old,tag = version(),f'v{new}'
    if numbers(new)<numbers(old): stop(f'{new} does not come after {old}, the version in {lib}')
    if git('tag','--list',tag): stop(f'there is a tag {tag} already')
    if new!=old and not says_something(section('Unreleased', read('CHANGELOG.md'))):
        stop('CHANGELOG.md has nothing under "## [Unreleased]"')
    if dirty:=git('status','--porcelain'): stop(f'there are changes that are not committed:\n{dirty}')

def agree(tag):
    "The section of the changelog for `tag`; an error unless tag, version and changelog agree"
    if tag!=f'v{version()}': stop(f'the tag is {tag}, the version in {lib} {version()}')
    text = section(version(), read('CHANGELOG.md'))
    if not says_something(text): stop(f'CHANGELOG.md has nothing under "## [{version()}]"')
    return text

def example():
    "The example of README.md that can run by itself"
    blocks = re.findall(r'^```python\n(.*?)^```$', read('README.md'), re.M|re.S)
    code, = [o for o in blocks if 'import' in o]
    return code

def recipe(sdist):
    "The recipe for conda, of that sdist"
    sdist = Path(sdist)
    if sdist.name!=f'fastaccum-{version()}.tar.gz': stop(f'{sdist.name} is not the sdist of {version()}')
    return put(read('conda/recipe.yaml'), r'^  sha256: (.+)$', hashlib.sha256(sdist.read_bytes()).hexdigest())

def alone(dist):
    "README's example with the wheel, from an empty folder, where this clone cannot be imported"
    wheel, = Path(dist).glob('*.whl')
    with tempfile.TemporaryDirectory() as tmp:
        there = Path(tmp)/'there'
        subprocess.run([sys.executable,'-m','pip','install','-q','--no-deps','--target',there,wheel], check=True)
        (Path(tmp)/'example.py').write_text(
            f'import fastaccum; assert fastaccum.__file__.startswith({str(there)!r})\n'+example(), encoding='utf-8')
        env = os.environ | dict(PYTHONPATH=str(there), MPLBACKEND='agg', OMP_NUM_THREADS='1')
        subprocess.run([sys.executable,'-W','ignore','example.py'], cwd=tmp, env=env, check=True,
            stdout=subprocess.DEVNULL)

def check(what):
    "Check what a release promises; `what` names some of tests, site, dist"
    env = os.environ | ({'SITE':'built'} if 'site' in what else {})
    def call(*args): subprocess.run(list(map(str, args)), cwd=root, env=env, check=True)
    if 'site' in what: call(sys.executable, '-W', 'ignore', 'docs/build.py')
    if 'tests' in what: call(sys.executable, 'tests/run.py')
    if 'dist' in what:
        with tempfile.TemporaryDirectory() as tmp:
            call(sys.executable, '-m', 'build', '--outdir', tmp)
            call(sys.executable, '-m', 'twine', 'check', '--strict', *Path(tmp).iterdir())
            alone(tmp)

def release(new, what):
    "Write, check, commit and tag the version `new`"
    refusals(new)
    files = written(new, datetime.date.today().isoformat())
    try:
        for nm,text in files.items(): (root/nm).write_text(text, encoding='utf-8')
        agree(f'v{new}')
        check(what)
        if files: git('commit','-q','-m',f'Version {new}','--',*files)
    except BaseException:
        if files: git('checkout','-q','HEAD','--',*files)
        raise
    git('tag','-a',f'v{new}','-m',f'fastaccum {new}')
    print(f'v{new} is tagged, and nothing was pushed. To release it: git push --atomic origin HEAD v{new}')

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('version', nargs='?', help='the version to release, as in 0.2.0')
    parser.add_argument('--checks', default='tests site dist', help='which checks to make before the tag')
    parser.add_argument('--agree', metavar='TAG'); parser.add_argument('--recipe', metavar='SDIST')
    parser.add_argument('--example', action='store_true')
    args = parser.parse_args()
    if args.agree: print(agree(args.agree))
    elif args.example: print(example(), end='')
    elif args.recipe: print(recipe(args.recipe), end='')
    elif not args.version: stop('say which version, as in: make release VERSION=0.2.0')
    else:
        try: release(args.version, args.checks.split())
        except subprocess.CalledProcessError as e:
            stop(f'this failed, as said above: {" ".join(map(str, e.cmd))}\n{e.stderr or ""}')

if __name__=='__main__': main()
