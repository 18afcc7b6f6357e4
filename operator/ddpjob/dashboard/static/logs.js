// Streams a log. At most MOST lines stay on the page.
"use strict";
(() => {
  const MOST = 5000;
  const log = document.getElementById("log"), state = document.getElementById("log-state");
  const follow = document.getElementById("follow"), find = document.getElementById("find");
  let words = "", matching = 0, ended = false;

  const fits = (text) => !words || text.toLowerCase().includes(words);
  function count() {
    const lines = log.childElementCount;
    state.textContent = `${words ? `${matching} of ` : ""}${lines} line${lines === 1 ? "" : "s"}` + (lines >= MOST ? ", the newest" : "")
      + (ended ? "; the log has ended" : "");
  }
  function add(lines) {
    const made = document.createDocumentFragment();
    for (const text of lines.slice(-MOST)) {
      const line = document.createElement("span");
      line.textContent = text;
      if (text.startsWith("-- ")) line.className = "note";
      line.hidden = !fits(text);
      if (!line.hidden) matching += 1;
      made.append(line);
    }
    log.append(made);
    while (log.childElementCount > MOST) {
      if (!log.firstElementChild.hidden) matching -= 1;
      log.firstElementChild.remove();
    }
    count();
    if (follow.checked) log.scrollTop = log.scrollHeight;
  }

  let source = null;
  function open() {
    if (source || ended) return;
    log.replaceChildren();
    matching = 0;
    state.textContent = "Waiting for the first line";
    source = new EventSource(log.dataset.path);
    source.addEventListener("open", () => { log.replaceChildren(); matching = 0; });  // each connection starts from the beginning
    source.addEventListener("message", (event) => add(JSON.parse(event.data)));
    source.addEventListener("end", () => { ended = true; source.close(); source = null; count(); });
    source.addEventListener("error", () => {
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        state.textContent = "The log cannot be read at the moment; retrying";
        setTimeout(open, 5000);
      }
    });
  }
  document.getElementById("pod").addEventListener("change", () => document.getElementById("log-form").requestSubmit());
  document.getElementById("wrap").addEventListener("change", (event) => log.classList.toggle("wrap", event.target.checked));
  follow.addEventListener("change", () => { if (follow.checked) log.scrollTop = log.scrollHeight; });
  // Scrolling up stops following, and scrolling to the end resumes it.
  log.addEventListener("scroll", () => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
    if (follow.checked !== atEnd) follow.checked = atEnd;
  });
  find.addEventListener("input", () => {
    words = find.value.toLowerCase();
    matching = 0;
    for (const line of log.children) { line.hidden = !fits(line.textContent); if (!line.hidden) matching += 1; }
    count();
  });
  document.getElementById("log-form").addEventListener("submit", (event) => { if (document.activeElement === find) event.preventDefault(); });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    else if (source && !ended) { source.close(); source = null; }
  });
  open();
})();
