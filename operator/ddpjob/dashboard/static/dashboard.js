// Keeps a page up to date: when the server announces a change, the page is fetched again.
"use strict";
(() => {
  const shown = document.getElementById("live");
  const of = document.body.dataset.liveOf;
  if (of === "none") return;
  let source = null, timer = 0, last = 0, running = false, again = false;

  function say(kind, text) {
    shown.className = `live ${kind}`;
    if (shown.textContent !== text) shown.textContent = text;
  }

  // Updates `old` to match `fresh`. Equal nodes are kept, so focus, selection, open details and scrolling stay.
  function morph(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== 1 || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(fresh);
      return;
    }
    for (const { name } of [...old.attributes])
      if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const olds = [...old.childNodes], news = [...fresh.childNodes];
    news.forEach((node, at) => (at < olds.length ? morph(olds[at], node) : old.append(node)));
    olds.slice(news.length).forEach((node) => node.remove());
  }

  // Maps each row's id to the name and state of its job. On a job's own page, the key is "title".
  function states() {
    const rows = [...document.querySelectorAll("tr[id] .state, h1 .state")].map((state) => {
      const row = state.closest("tr");
      const name = row ? row.querySelector("th").textContent : document.querySelector("h1").firstChild.textContent;
      return [row ? row.id : "title", [name.trim(), state.textContent.trim()]];
    });
    return new Map(rows);
  }

  // Announces changes to screen readers, for at most three jobs at once.
  function announce(before) {
    const changed = [...states()].filter(([id, [, state]]) => before.has(id) && before.get(id)[1] !== state);
    const said = changed.slice(0, 3).map(([, [name, state]]) => `${name} is ${state}`);
    if (changed.length > said.length) said.push(`${changed.length - said.length} more changed state`);
    if (said.length) document.getElementById("changes").textContent = said.join(", ");
  }

  async function refresh() {
    if (running) { again = true; return; }
    running = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (answer.status === 404) { say("off", "deleted"); return; }
      if (!answer.ok) { say("off", page.title || `error ${answer.status}`); return; }
      const before = states();
      const focused = document.activeElement, row = focused && focused.closest("tr[id]");
      for (const region of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(region.id);
        if (fresh) morph(region, fresh);
      }
      if (row && !focused.isConnected) document.getElementById(row.id)?.querySelector("a")?.focus();
      announce(before);
      say("on", "live");
      document.dispatchEvent(new Event("ddpjob:refreshed"));
    } catch {
      say("off", "no connection");
    } finally {
      last = Date.now();
      running = false;
      if (again) { again = false; soon(); }
    }
  }

  // At most once a second, regardless of the number of changes.
  function soon() {
    clearTimeout(timer);
    timer = setTimeout(refresh, Math.max(0, last + 1000 - Date.now()));
  }

  function connect() {
    if (source) return;
    source = new EventSource("/live" + (of ? `?job=${encodeURIComponent(of)}` : ""));
    source.addEventListener("open", () => say("on", "live"));
    source.addEventListener("changed", soon);
    source.addEventListener("error", () => {
      say("off", "no connection");
      if (source && source.readyState === EventSource.CLOSED) { disconnect(); setTimeout(connect, 5000); }
    });
  }
  function disconnect() {
    if (source) source.close();
    source = null;
  }
  // A hidden page sends no requests, because browsers allow few connections to one server.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  connect();
  setInterval(() => { if (!document.hidden && Date.now() - last > 15000) refresh(); }, 5000);  // updates the ages

  const words = document.getElementById("q") || document.getElementById("find");
  document.addEventListener("keydown", (event) => {
    const typing = document.activeElement.matches("input:not([type=checkbox]), select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && words) {
      event.preventDefault();
      words.focus();
      words.select();
    }
  });

  const filter = document.getElementById("filter");
  if (filter) {
    let waiting = 0;
    const go = () => {
      const address = new URL(location.href);
      address.searchParams.delete("page");
      const text = filter.elements.q.value.trim();
      if (text) address.searchParams.set("q", text); else address.searchParams.delete("q");
      if (address.href === location.href) return;
      history.replaceState(null, "", address);
      last = 0;
      refresh();
    };
    filter.addEventListener("submit", (event) => { event.preventDefault(); go(); });
    filter.elements.q.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(go, 150); });
  }
})();
