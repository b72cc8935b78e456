// Puts the page together: the two views, and what happens when a key is entered.

import { loadModels, startChat } from './chat.js';
import { byId } from './dom.js';
import { enterKey, startOptions } from './options.js';
import { showServer } from './server.js';

function showView() {
  const server = location.hash === '#server';
  byId('chat').hidden = server;
  byId('server').hidden = !server;
  document.title = server ? 'Server – darkbloom' : 'darkbloom';
  for (const link of document.querySelectorAll('nav a')) {
    const here = link.hash === (server ? '#server' : '#chat');
    if (here) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  showServer(server);
}

/** Begin where the view begins; on a screen without a pointer not in a field, which would bring up its keyboard. */
function focusView() {
  if (!byId('server').hidden) byId('server').querySelector('h1').focus();
  else if (window.matchMedia('(hover: hover)').matches) byId('message').focus({ preventScroll: true });
}

startOptions(() => {
  loadModels();
  showView();
});
startChat(enterKey);
loadModels();
window.addEventListener('hashchange', () => {
  showView();
  focusView();
});
window.addEventListener('focus', loadModels); // the server may have been started anew meanwhile
showView();
focusView();
