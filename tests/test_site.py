"""Tests of the documentation site, most of them in a browser. `make docs-test` builds the site and runs them.

All of them are skipped if the site has not been built, and those in a browser are skipped without Chromium. With
`SITE=built`, a missing site is a failure. `SHOTS=folder` saves screenshots of each page, wide and narrow, light and
dark.
"""
import functools, inspect, json, os, re, shutil, sys
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
import pytest

root = Path(__file__).resolve().parent.parent
site = root/'_docs'
chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')

def skip(why):
    if os.environ.get('SITE')=='built': pytest.fail(f'the site should have been built, but {why}')
    pytest.skip(f'THE SITE IS NOT TESTED: {why}', allow_module_level=True)
if not (site/'objects.inv').exists(): skip('it has not been built: make docs')
try: from playwright.sync_api import sync_playwright
except ImportError: skip('playwright is not installed: make docs')
sys.path.insert(0, str(root/'docs'))
from nbdev.doclinks import nbglob
from sphinx.util.inventory import InventoryFile
from build import hides, moved, order, page as page_of, resolve, split_errors
sources = [fn for folder in ('docs','fastaccum','nbs','skills') for fn in (root/folder).rglob('*.*')]
built = (site/'searchindex.js').stat().st_mtime
if any(fn.stat().st_mtime>built for fn in sources if '__pycache__' not in fn.parts):
    skip('it is older than what it is made of: make docs')

redirects = {f'{o}.html' for o in moved}
pages = sorted({o.relative_to(site).as_posix() for o in site.rglob('*.html') if '_static' not in o.parts}-redirects)
# from Sphinx's inventory for other projects: short name -> (full name, page with its entry)
inventory = InventoryFile.loads((site/'objects.inv').read_bytes(), uri='')
entries = {re.sub(r'^fastaccum\.(core\.)?\w+\.', '', full): (full, item.uri.partition('.html')[0])
    for kind,items in inventory.data.items() if kind.startswith('py:') for full,item in items.items()}
names = {nm:full for nm,(full,_) in entries.items()}
# modules that users import: each has a page for users besides the page with the whole module
doors = sorted(o.stem for o in (site/'modules').glob('*.html') if o.stem!='index')
below_api = 'reference/auto_size','reference/warnings'   # pages of names that have no module of their own
users = [f'{o}.html' for o in ('index',*order,*below_api,*doors) if not o.startswith('contribute/')]

# Tests that need no browser

@functools.cache
def read(page): return (site/page).read_text(encoding='utf-8')
@functools.cache
def ids(page): return set(re.findall(r'\sid="([^"]+)"', read(page)))
def hrefs(page): return {unescape(o) for o in re.findall(r'\s(?:href|src)="([^"]+)"', read(page))}

@pytest.mark.parametrize('page', pages)
def test_links_resolve(page):
    bad = []
    for href in hrefs(page):
        url,anchor = urldefrag(urljoin(f'http://site/{page}', href))
        if not url.startswith('http://site/'): continue
        path = unquote(url.removeprefix('http://site/').partition('?')[0]) or 'index.html'
        if not (site/path).is_file(): bad.append(href)
        elif anchor and path.endswith('.html') and unquote(anchor) not in ids(path): bad.append(href)
    assert not bad

@pytest.mark.parametrize('page', pages)
def test_no_link_stands_within_another(page):
    assert not re.search(r'<a [^>]*>(?:(?!</a>).)*?<a ', read(page), re.S)

def test_old_addresses_lead_on():
    for old,target in moved.items():
        page,_,anchor = target.partition('#')
        assert f'url={"../"*old.count("/")}{target}"' in (site/f'{old}.html').read_text(encoding='utf-8')
        assert anchor in ids(page)

def sidebar(page):
    "Return the pages to which the sidebar of `page` links, in order"
    text = read(page).partition('<div class="sidebar-tree">')[2].partition('</div>')[0]
    found = re.findall(r'<li class="toctree-l\d[^"]*"><a class="[^"]*" href="([^"]+)"', text)
    return [urljoin(page, page.rpartition('/')[2] if o=='#' else o) for o in found]

def test_users_and_contributors_have_menus_of_their_own():
    "The users' pages are in the order of `order`; the contributors' menu has every module"
    api = [f'{o}.html' for o in (*doors,*below_api)]   # these pages are listed below the page API
    listed = [o for o in sidebar('index.html') if o not in api]
    assert listed==[f'{o}.html' for o in order if not o.startswith('contribute/')]
    assert {f'{o}.html' for o in doors}<=set(sidebar('index.html'))
    mods = {page_of(o.relative_to(root/'nbs')) for o in (root/'nbs').rglob('[0-9]*_*.ipynb')}
    inner = {f'modules/{o}.html' if o in doors else f'{o}.html' for o in mods}
    own = sidebar('contribute/index.html')
    assert inner<=set(own) and {f'{o}.html' for o in order if o.startswith('contribute/')}<=set(own)
    assert sorted(users+own[1:])==sorted(set(pages)-{'search.html'})

def test_errors_are_told_apart_from_the_docstring():
    doc = 'Refuse it\n\nMore: about it\n\nTypeError: it is\n  no number\ntorch.OutOfMemoryError: too large\n'
    text,errors = split_errors(doc)
    assert text=='Refuse it\n\nMore: about it'
    assert errors==[['TypeError','it is no number'], ['torch.OutOfMemoryError','too large']]
    assert split_errors('ValueError: is only the first line')==('ValueError: is only the first line', [])

def test_pages_that_the_modules_name_exist():
    for fn in (root/'fastaccum').rglob('*.py'):
        text = fn.read_text(encoding='utf-8')
        for o in re.findall(r'https://fastaccum.github.io/fastaccum/(\S+?)["\s]', text): assert (site/o).is_file(), o

def test_every_public_name_has_an_entry():
    for fn in (root/'fastaccum').rglob('[a-z]*.py'):
        mod = import_module('.'.join(fn.relative_to(root).with_suffix('').parts))
        own = [nm for nm in getattr(mod, '__all__', []) if fn.stem!='all']
        documented = {nm.split('.')[-1] for nm in names}   # nbdev lists some patched methods as names
        assert [nm for nm in own if nm not in documented]==[], fn.name

@pytest.mark.parametrize('name', names)
def test_each_entry_is_complete(name):
    "The entry of a public name has an anchor, a link to the lines that define the name, and a table of errors"
    full,page = entries[name]
    page = f'{page}.html'
    assert {full,name.lower()} <= ids(page)
    sign,_,entry = read(page).partition(f'id="{full}"')[2].partition('</dl>')[0].partition('</dt>')
    pinned,path,line = re.search(r'href="[^"]+/blob/([^/"]+)/([^#"]+)(?:#L([^"]+))?"', sign).groups()
    assert pinned!='main' or not (root/'.git').exists()   # line numbers change on a branch
    text = (root/path).read_text(encoding='utf-8').split('\n')
    short = name.split('.')[-1]
    if line: assert re.search(fr'(def|class) {short}\b', '\n'.join(text[int(line.split('-')[0])-1:][:3]))
    else: assert re.search(fr'^{short}\b', '\n'.join(text), re.M)
    o = resolve(import_module(full.removesuffix(f'.{name}')), name)
    if not (inspect.isclass(o) or inspect.isfunction(o)): return
    docs = [o.__doc__] + ([o.__init__.__doc__] if inspect.isclass(o) and '__init__' in vars(o) else [])
    errors = [e for doc in filter(None, docs) for e in split_errors(inspect.cleandoc(doc))[1]]
    assert ('<p>Errors</p>' in entry)==bool(errors)
    for o,_ in errors: assert f'>{o}</span>' in entry and f'{o}:' not in entry

guides = [o for o in order if o.startswith(('get_started','guides/'))]

@pytest.mark.parametrize('page', doors)
def test_an_api_page_begins_with_what_to_type(page):
    code = re.search(r'<pre>(.*?)</pre>', read(f'{page}.html').partition('<article')[2], re.S)[1]
    assert re.search(r'(?:from|import) .*fastaccum', re.sub('<.*?>', '', code).partition('\n\n')[0])

@pytest.mark.parametrize('page', guides)
def test_guides_open_in_colab(page):
    colab = f'https://colab.research.google.com/github/fastaccum/fastaccum/blob/main/nbs/{page}.ipynb'
    assert colab in hrefs(f'{page}.html')
    assert 'google.colab' not in read(f'{page}.html')   # the cell that installs fastaccum is hidden

def test_the_site_hides_plumbing_but_no_import():
    "Readers need the imports to run the cells below them"
    assert hides({'hide':''}, '#| hide\nimport nbdev; nbdev.nbdev_export()')
    assert hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *') and hides({'default_exp':'x'}, '')
    assert hides({'hide':''}, 'assert 1') and hides({'hide':''}, '%matplotlib inline')
    assert not hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *\nimport torch') and not hides({}, 'assert 1')
    text = read('modules/accumulation.html')
    assert 'Show the imports' in text and 'showdoc' not in text and 'nbdev_export' not in text

def test_formulas_are_rendered():
    text = read('modules/noise_scale.html')
    assert '<math ' in text and '<mfrac>' in text and 'Σ</mi>' in text
    for page in pages:
        text = read(page).partition('<article')[2].partition('</article>')[0]
        text = re.sub(r'<(pre|code)\b.*?</\1>', '', text, flags=re.S)   # code may contain a dollar sign
        assert '$' not in text, page

def test_pages_have_descriptions_and_a_link_to_the_repository():
    "Search engines and link previews show the description, which is different on each page, and the picture"
    told = []
    for page in {*pages}-{'search.html'}:
        text = read(page)
        told.append(re.search(r'<meta name="description" content="([^"`]{10,})">', text)[1])
        picture = re.search(r'<meta property="og:image" content="https://fastaccum.github.io/fastaccum/([^"]+)">', text)
        assert (site/picture[1]).is_file(), page
        assert 'class="repository" href="https://github.com/fastaccum/fastaccum"' in text, page
    assert len(told)>60 and len(set(told))==len(told)
    assert (root/'docs/preview.png').read_bytes()==(root/'images/same-run.png').read_bytes()

def test_every_notebook_has_a_copy_in_markdown():
    "With its title, and with links to pages and pictures that are there"
    fns = {site/f'{page}.md': page for page in pages if page!='search.html'}
    assert set(site.rglob('*.html.md'))==set(fns)
    for fn,page in fns.items():
        text = fn.read_text(encoding='utf-8')
        title = re.search(r'<h1>(.*?)<a class="headerlink"', read(page))[1]
        title = unescape(re.sub('<.*?>', '', title)).replace('’', "'")
        if page.removesuffix('.html') in doors:   # its title is a list of names
            assert [o for o in title.split(', ') if o.removeprefix('learn.') not in text]==[], fn
        else: assert text.startswith(f'# {title}\n'), fn
        text = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
        assert not re.search(r'\]\((?!http)[^)]*\.ipynb|^\{\.', text, re.M), fn
        named = re.findall(r'\]\(https://fastaccum\.github\.io/fastaccum/?([^)#\s]*)', text)
        assert [o for o in named if not (site/(o or 'index.html')).is_file()]==[], fn
    for nb in nbglob(root/'nbs', as_path=True):   # from the notebook, with its code
        text = (site/f'{page_of(nb.relative_to(root/"nbs"))}.html.md').read_text(encoding='utf-8')
        title = ''.join(json.loads(nb.read_text(encoding='utf-8'))['cells'][0]['source'][:1])
        assert text.startswith(title.strip()), nb

def test_llms_txt_lists_every_page():
    "In the form of llmstxt.org: a title, a summary, sections of links with a description; pages for contributors last"
    text = (site/'llms.txt').read_text(encoding='utf-8')
    assert re.match(r'# fastaccum\n\n> \S.{100,}\n\n', text)
    base = re.escape('https://fastaccum.github.io/fastaccum/')
    sections = text.split('\n## ')[1:]
    listed = {o.partition('\n')[0]: re.findall(fr'^- \[.+\]\({base}(.+)\.md\): \S.+$', o, re.M) for o in sections}
    in_order = [o for names in listed.values() for o in names]
    assert sorted(in_order)==sorted({*pages}-{'search.html'})
    assert [*listed][-1]=='Optional' and not {*listed['Optional']}&{*users}
    lines = [o for section in sections for o in section.splitlines()[1:] if o]
    assert len(lines)==len(in_order)   # nothing in a section but links that were found

def test_what_assistants_read_is_on_the_site():
    text = (site/'SKILL.md').read_text(encoding='utf-8')
    assert text==(root/'skills/fastaccum/SKILL.md').read_text(encoding='utf-8')
    assert '/fastaccum/SKILL.md)' in (site/'llms.txt').read_text(encoding='utf-8')
    named = re.findall(r'https://fastaccum\.github\.io/fastaccum/([^)#\s]+)', text)
    assert named and [o for o in named if not (site/o).is_file()]==[]

# Tests in a browser

# Badges on the home page are the only content from other servers; tests replace each by an empty picture
badges = re.compile(r'https://(img\.shields\.io/pypi/|github\.com/[^?]+/badge\.svg)')
svg = '<svg xmlns="http://www.w3.org/2000/svg" width="110" height="20"/>'

url = 'http://localhost/'   # the address at which `serve` answers with files of the site

@pytest.fixture(scope='session')
def opened():
    "Open a browser tab for all tests; its list `wrong` collects errors and requests to other servers"
    if not chromium: pytest.skip('THE SITE IS NOT TESTED IN A BROWSER: install Chromium (apt-get install chromium)')
    wrong = []
    def serve(route):
        to = route.request.url
        path = site/(unquote(urlsplit(to).path)[1:] or 'index.html')
        if badges.match(to): return route.fulfill(content_type='image/svg+xml', body=svg)
        if to.startswith(url) and path.is_file(): return route.fulfill(path=path)
        wrong.append(f'not of the site: {to}')
        route.abort()
    with sync_playwright() as p:
        args = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
        context = p.chromium.launch(executable_path=chromium, args=args).new_context()
        context.route('**', serve)
        page = context.new_page()
        page.set_default_timeout(120_000)   # ms, for busy machines
        page.on('console', lambda o: o.type=='error' and wrong.append(f'console: {o.text}'))
        page.on('pageerror', lambda o: wrong.append(f'error: {o}'))
        page.wrong = wrong
        yield page

@pytest.fixture
def tab(opened):
    opened.wrong.clear()
    return opened

look = """() => {
    const wrong = [], width = document.documentElement.clientWidth, all = (s) => [...document.querySelectorAll(s)];
    const seen = (e) => e.getClientRects().length > 0;
    const scrolls = (e) => { for (; e && e.tagName != 'BODY'; e = e.parentElement)
        if (['auto','scroll'].includes(getComputedStyle(e).overflowX)) return e; return null; };
    const whole = document.documentElement.scrollWidth;
    if (whole > width) wrong.push(`scrolls sideways: ${whole} > ${width}`);
    for (const e of all('article img')) {
        if (!e.alt) wrong.push(`no alt text: ${e.src}`);
        if (!e.naturalWidth) wrong.push(`no picture: ${e.src}`);
        if (seen(e) && e.getBoundingClientRect().right > width+1) wrong.push(`picture cut: ${e.src}`);
    }
    for (const e of all('article table').filter(seen)) {
        const box = scrolls(e);
        if ((box || e).getBoundingClientRect().right > width+1) wrong.push(`table cut: ${e.textContent.slice(0, 40)}`);
        const contributors = location.pathname.includes('/contribute/');   // their tables may scroll
        if (!e.closest('details') && !contributors && box && box.scrollWidth > box.clientWidth+1)
            wrong.push(`table scrolls: ${e.textContent.slice(0, 40)}`);
    }
    const link = document.querySelector('a.repository'), title = document.querySelector('article h1');
    if (width < 500 && link && title && link.getBoundingClientRect().bottom >
        title.getBoundingClientRect().top + parseFloat(getComputedStyle(title).paddingTop))
        wrong.push('the link to GitHub touches the title');
    const lone = (e) => e && !document.querySelector('article dl.py') &&   // pages of modules have many
        e.matches('div.cell:has(> details.hide):not(:has(> .cell_output))');
    for (const e of all('article div.cell'))
        if (lone(e) && lone(e.nextElementSibling)) wrong.push(`folded twice: ${e.textContent.trim().slice(0, 40)}`);
    for (const e of all('article pre').filter(seen)) {
        const style = getComputedStyle(e);
        if (width < 500 && e.closest('.columns') && style.whiteSpace != 'pre')
            wrong.push(`columns wrap: ${e.textContent.slice(0, 40)}`);
        if (e.scrollWidth <= e.clientWidth+1) continue;
        if (width > 500 && !e.closest('.cell_output')) wrong.push(`code scrolls: ${e.textContent.slice(0, 40)}`);
        if (!['auto','scroll'].includes(style.overflowX)) wrong.push(`cut: ${e.textContent.slice(0, 40)}`);
    }
    for (const e of all('article p'))
        if (/^\\||\\]\\(|^#+ |```/.test(e.textContent)) wrong.push(`Markdown left over: ${e.textContent.slice(0, 40)}`);
    const linear = (o) => (o /= 255) <= .04045 ? o/12.92 : ((o+.055)/1.055)**2.4;
    const light = (c) => { const v = c.match(/[\\d.]+/g).map(Number).slice(0, 3).map(linear);
        return .2126*v[0]+.7152*v[1]+.0722*v[2]; };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    for (const e of all('article p, article li, article td, article h1, .sidebar-tree a').filter(seen)) {
        const [a,b] = [light(getComputedStyle(e).color), ground].sort((x,y) => y-x);
        if ((a+.05)/(b+.05) < 4.5) { wrong.push(`hard to read: ${e.textContent.slice(0, 40)}`); break; }
    }
    return [wrong, ground];
}"""

# The bottom of an element, in pixels from the top of the screen
ends = "(s) => { const e = document.querySelector(s); return e ? e.getBoundingClientRect().bottom : Infinity; }"

@pytest.mark.parametrize('page', pages)
def test_each_page_is_readable_on_wide_and_narrow_screens(tab, page):
    "The page is loaded once, and its folded code is unfolded to be checked as well"
    shots = os.environ.get('SHOTS')
    tab.set_viewport_size(dict(width=1440, height=900))
    tab.goto(url+page, wait_until='load')
    if page=='reference/cheat_sheet.html': assert tab.evaluate(ends, 'section#words table')<=900   # fits one screen
    if page.removesuffix('.html') in doors:   # the first screen shows the signature, and most parameters
        assert tab.evaluate(ends, 'article dl.py > dt')<500
        rows = ' tr' if page in ('accumulation.html','accum_find.html','wandb.html') else ''
        assert tab.evaluate(ends, f'article dl.py table{rows}')<=900
    for device,size in (('wide',(1440,900)), ('narrow',(390,844))):
        tab.set_viewport_size(dict(width=size[0], height=size[1]))
        if page=='accumulation.html': assert tab.locator('[data-label=Default]').count()
        for scheme in ('light','dark'):
            tab.emulate_media(color_scheme=scheme)
            if shots: tab.screenshot(path=f'{shots}/{page.replace("/", "-")}-{device}-{scheme}.png', full_page=True)
            tab.evaluate("document.querySelectorAll('article details').forEach(o => o.open = true)")
            wrong,ground = tab.evaluate(look)
            assert wrong+tab.wrong==[], (device,scheme)
            assert (ground<0.2)==(scheme=='dark')

def test_code_stands_beside_what_replaces_it_and_on_a_phone_above_it(tab):
    pairs = """() => {
        const corner = (e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().top];
        const old = [...document.querySelectorAll('article div.highlight-python:has(+ div.cell)')];
        return old.map((e) => [corner(e), corner(e.nextElementSibling)]);
    }"""
    for width,beside in ((1440,True), (390,False)):
        tab.set_viewport_size(dict(width=width, height=900))
        tab.goto(f'{url}about/switching.html')
        found = tab.evaluate(pairs)
        assert len(found)==6
        for (left,top),(left_of_new,top_of_new) in found:
            if beside: assert top==top_of_new and left_of_new>left+300
            else: assert left==left_of_new and top_of_new>top+100

# run on the page of the search: for each query, return the addresses of the results
search = """(words) => Object.fromEntries(words.map((o) => [window.asked = o,
    Search._performSearch(...Search._parseQuery(o)).map(([page,,anchor]) => page + '.html' + anchor)]))"""

@pytest.fixture
def found(tab):
    "Return a function that searches the site for each of some queries; it returns the results by query"
    tab.goto(f'{url}search.html?q=GradientAccumulation')   # search once as a reader does
    tab.wait_for_selector('#search-results a[href$="#fastaccum.accumulation.GradientAccumulation"]',
        state='attached')
    yield lambda words: tab.evaluate(search, list(words))
    assert not tab.wrong

def test_search_finds_the_names_that_users_import_and_no_internal_page(found):
    results = found(names)
    outer = {nm for nm,(_,page) in entries.items() if f'{page}.html' in users}
    assert outer and [nm for nm in outer if not any(o.endswith(f'#{names[nm]}') for o in results[nm])]==[]
    assert not [o for nm in names for o in results[nm] if o.partition('#')[0] not in users]

# Queries by the page that must be their first result
searches = json.loads((root/'tests/searches.json').read_text(encoding='utf-8'))
answers = {q:page for page,qs in searches.items() for q in qs}

# Keywords that pages give to their sections, and words of messages with the entry to find
keywords = json.loads(re.search('^const keywords = (.*);$', read('_static/language_data.js'), re.M)[1])
said = {'loss not a mean':'loss-not-a-mean', '2 callbacks accumulate':'two-callbacks',
    'memory ran out with a single sample':'out-of-memory', 'memory ran out with a micro-batch':'memory-ran-out'}
sections = {q:f'{page}.html#{at}' for page,qs in keywords.items() for q,at in qs if at and 'messages' not in page} | {
    q:f'reference/messages.html#{o}' for q,o in said.items()}

def test_queries_lead_to_the_page_or_section_that_answers(found):
    results = found(answers)
    first = {q:(results[q] or ['nothing'])[-1].partition('.html')[0] for q in answers}
    assert {q:o for q,o in first.items() if o!=answers[q]}=={}
    assert not found(['ormalis'])['ormalis']   # the search matches beginnings of words, not parts within
    led = found(sections)
    assert {q:led[q][-1:] for q,o in sections.items() if led[q][-1:]!=[o]}=={}
    for o in sections.values(): assert o.partition('#')[2] in ids(o.partition('#')[0])
    # pages for contributors are never found
    inner = ('core/','modules/','contribute/')
    assert not [o for q in answers for o in results[q] if o.startswith(inner)]
