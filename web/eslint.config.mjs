// `make lint-js`, or: npm install --prefix .cache/js eslint@10 && .cache/js/node_modules/.bin/eslint -c web/eslint.config.mjs web

const html = (property) => ({
  selector: `MemberExpression[property.name='${property}']`,
  message: "Names from a file may hold HTML: build elements with lib/dom.js.",
});

export default [
  {
    files: ["web/**/*.js"],
    languageOptions: {
      ecmaVersion: 2023,
      sourceType: "module",
      globals: Object.fromEntries(
        [
          "AbortController", "CSS", "Intl", "MutationObserver", "ResizeObserver", "URL", "URLSearchParams", "clearInterval", "clearTimeout", "console",
          "document", "fetch", "getComputedStyle", "navigator", "performance", "queueMicrotask", "setInterval", "setTimeout", "window",
        ].map((name) => [name, "readonly"]),
      ),
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      "consistent-return": "error",
      curly: ["error", "multi-line"],
      "default-case-last": "error",
      eqeqeq: ["error", "always", { null: "ignore" }],
      "no-cond-assign": "error",
      "no-const-assign": "error",
      "no-dupe-args": "error",
      "no-dupe-class-members": "error",
      "no-dupe-keys": "error",
      "no-empty": "error",
      "no-eval": "error",
      "no-fallthrough": "error",
      "no-implied-eval": "error",
      "no-invalid-this": "error",
      "no-new-func": "error",
      "no-redeclare": "error",
      "no-restricted-syntax": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML", "write"].map(html)],
      "no-self-assign": "error",
      "no-shadow": "error",
      "no-throw-literal": "error",
      "no-undef": "error",
      "no-unreachable": "error",
      "no-unused-expressions": "error",
      "no-unused-private-class-members": "error",
      "no-unused-vars": "error",
      "no-use-before-define": ["error", { functions: false, variables: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
      "prefer-template": "error",
      radix: "error",
    },
  },
];
