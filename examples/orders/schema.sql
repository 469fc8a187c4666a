-- The tables of the shop. kconsume creates its own tables.
create table orders (
    number int primary key,
    sku text not null,
    quantity int not null,
    cancelled boolean not null default false,
    state text not null default 'placed',
    answers int not null default 0 -- how often an answer of the inventory was recorded
);
create table stock (sku text primary key, reserved int not null default 0);
create table ledger (number int not null, sku text not null, quantity int not null, attempt int not null);
create index on ledger (number);
-- The table of the letter office.
create table letters (key text primary key, number int not null, text text not null, asked int not null default 1);
