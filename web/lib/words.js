// The panel's own words in the language of the interface. What the server says about a file is English.

const LANGUAGES = ["en", "zh", "ja", "ko", "de", "fr", "es", "ru"];

let english = {};
let local = {};

async function fetchWords(language) {
  const answer = await fetch(new URL(`../words/${language}.json`, import.meta.url));
  if (!answer.ok) throw new Error(`words/${language}.json: ${answer.status}`);
  return answer.json();
}

/** Loads the words for a locale such as "zh-TW"; English stands in for a language we do not have. */
export async function loadWords(locale) {
  const base = String(locale).toLowerCase().split(/[-_]/)[0];
  const language = LANGUAGES.includes(base) ? base : "en";
  try {
    [english, local] = await Promise.all([fetchWords("en"), fetchWords(language)]);
  } catch (error) {
    console.warn("Quant Loader: no words,", error);
  }
}

/** The words for a key, with {name} places filled in. A key without words is shown as it is. */
export function t(key, values = {}) {
  const text = local[key] ?? english[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (place, name) => (name in values ? String(values[name]) : place));
}
